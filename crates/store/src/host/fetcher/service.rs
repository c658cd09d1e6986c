//! Serves missing chunks of memory from the remote store to restored VMMs. A grant is a file that
//! permits one VMM to fetch the memory layers of its snapshot.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors.

use super::connection::{ServiceEnd, VmmService};
use super::link::{VmmLink, registered};
use super::parts::OpenParts;
use crate::host::fetch_grants::{FetchGrant, GrantDirectory};
use crate::host::{RemoteError, RemoteStore};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::task::JoinSet;

/// Delay before reconnecting to a VMM whose connection was lost.
const RECONNECT_DELAY: Duration = Duration::from_millis(100);
/// Time without grants after which the service returns.
const LINGER: Duration = Duration::from_secs(10);

/// Service for the VMMs that have grants in one directory.
#[derive(Debug)]
pub struct FetchService {
    grants: GrantDirectory,
    parts: Arc<OpenParts>,
    /// Ids of grants that are being served.
    served: HashSet<String>,
    tasks: JoinSet<String>,
}

impl FetchService {
    /// Creates a service that fetches the layers of `grants` from `remote`.
    pub fn new(grants: GrantDirectory, remote: Arc<RemoteStore>) -> Self {
        Self {
            grants,
            parts: Arc::new(OpenParts::new(remote)),
            served: HashSet::new(),
            tasks: JoinSet::new(),
        }
    }

    /// Serves all present and future grants. Returns after [`LINGER`] without grants.
    pub async fn run(&mut self) -> Result<(), RemoteError> {
        let path = self.grants.path().to_owned();
        let failed = |e: nix::Error| RemoteError::io(&path)(e.into());
        let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
        let watch = Inotify::init(flags).map_err(failed)?;
        watch
            .add_watch(&path, AddWatchFlags::IN_MOVED_TO)
            .map_err(failed)?;
        let watch = registered(OwnedFd::from(watch)).map_err(RemoteError::io(&path))?;
        loop {
            // Read the grants after setting the watch, so that no new grant is missed.
            self.start_new()?;
            tokio::select! {
                changed = drained(&watch) => changed.map_err(RemoteError::io(&path))?,
                Some(ended) = self.tasks.join_next(), if !self.tasks.is_empty() => {
                    // The id of a panicked task remains in the set: its grant is not served again.
                    if let Ok(id) = ended {
                        self.served.remove(&id);
                    }
                }
                () = tokio::time::sleep(LINGER), if self.tasks.is_empty() => return Ok(()),
            }
        }
    }

    /// Starts serving new grants.
    fn start_new(&mut self) -> Result<(), RemoteError> {
        for id in self.grants.ids()? {
            if !self.served.insert(id.clone()) {
                continue;
            }
            match self.grants.read(&id) {
                Ok(grant) => {
                    let served = serve(self.grants.clone(), self.parts.clone(), id, grant);
                    self.tasks.spawn(served);
                }
                Err(e) => {
                    tracing::warn!(id, error = %e, "cannot read a grant");
                    self.grants.remove(&id);
                }
            }
        }
        Ok(())
    }
}

/// Serves a VMM until it exits or its layers are complete, then removes its grant.
async fn serve(
    grants: GrantDirectory,
    parts: Arc<OpenParts>,
    id: String,
    grant: FetchGrant,
) -> String {
    let service = VmmService::new(&parts, grant);
    loop {
        let served = match grants.connect(&id) {
            Ok(None) => break,
            Ok(Some(socket)) => match VmmLink::new(socket) {
                Ok(link) => service.serve(&link).await,
                Err(e) => Err(e),
            },
            Err(e) => Err(e),
        };
        match served {
            Ok(ServiceEnd::Complete) => break,
            Ok(ServiceEnd::Closed) => {}
            Err(e) => tracing::debug!(id, error = %e, "lost the connection to a VMM"),
        }
        tokio::time::sleep(RECONNECT_DELAY).await;
    }
    grants.remove(&id);
    id
}

/// Waits for an event and discards all pending events.
async fn drained(watch: &AsyncFd<OwnedFd>) -> io::Result<()> {
    let mut ready = watch.readable().await?;
    let mut events = [0; 4096];
    loop {
        match nix::unistd::read(watch.get_ref(), &mut events) {
            Ok(0) | Err(nix::Error::EAGAIN) => break,
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    ready.clear_ready();
    Ok(())
}

#[cfg(test)]
mod tests;
