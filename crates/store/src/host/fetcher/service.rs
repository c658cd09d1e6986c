//! Service of all VMMs that have grants.

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

/// Time after which a VMM that lost its connection is connected to again.
const RECONNECT_DELAY: Duration = Duration::from_millis(100);
/// Time for which the service waits for a further grant before it ends.
const LINGER: Duration = Duration::from_secs(10);

/// Service of the grants of one directory.
#[derive(Debug)]
pub struct FetchService {
    grants: GrantDirectory,
    parts: Arc<OpenParts>,
    /// Ids of grants that are served.
    served: HashSet<String>,
    tasks: JoinSet<String>,
}

impl FetchService {
    /// The service of `grants` from `remote`.
    pub fn new(grants: GrantDirectory, remote: Arc<RemoteStore>) -> Self {
        Self {
            grants,
            parts: Arc::new(OpenParts::new(remote)),
            served: HashSet::new(),
            tasks: JoinSet::new(),
        }
    }

    /// Serves all grants, also later ones. Returns when there have been none for a while.
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
            // After the watch was set, so that none is missed.
            self.begin()?;
            tokio::select! {
                changed = drained(&watch) => changed.map_err(RemoteError::io(&path))?,
                Some(ended) = self.tasks.join_next(), if !self.tasks.is_empty() => {
                    if let Ok(id) = ended {
                        self.served.remove(&id);
                    }
                }
                () = tokio::time::sleep(LINGER), if self.tasks.is_empty() => return Ok(()),
            }
        }
    }

    /// Begins to serve new grants.
    fn begin(&mut self) -> Result<(), RemoteError> {
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
                    tracing::warn!("a grant is not served: {e}");
                    self.grants.remove(&id);
                }
            }
        }
        Ok(())
    }
}

/// Serves a VMM until it ends or needs nothing any more; then removes its grant.
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
            Err(e) => tracing::debug!(id, "a connection to a VMM ended: {e}"),
        }
        tokio::time::sleep(RECONNECT_DELAY).await;
    }
    grants.remove(&id);
    id
}

/// Waits for an event, and forgets all that there are.
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
