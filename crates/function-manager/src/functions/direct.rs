//! Direct connections: clients whose connections a tenant's process serves itself.

use super::Functions;
use crate::function_error::FunctionError;
use crate::function_record::FunctionRecord;
use crate::function_state::FunctionState;
use crate::running_process::ProcessUse;
use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::function::{ControlRequest, DirectAccess, DirectConnection, DirectEvent};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::task::AbortHandle;

/// Time for a process to take a connection.
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(5);

/// Resources that a connection occupies while it is open.
pub trait ConnectionPermit: Send + Sync {
    /// Called when the connection becomes idle, and when a request is under way again. A new
    /// connection is busy.
    fn set_busy(&mut self, is_busy: bool);
}

/// [`ConnectionPermit`] of any type.
pub type BoxConnectionPermit = Box<dyn ConnectionPermit>;

/// Open connections by number.
type OpenConnections = Arc<Mutex<HashMap<u64, OpenConnection>>>;

/// Socket over which a process gets connections. It ends with this value, upon which the process
/// ends its connections after the requests under way.
#[derive(Debug)]
pub(crate) struct DirectLink {
    socket: Arc<AsyncFd<Channel>>,
    open: OpenConnections,
    next: AtomicU64,
    listening: AbortHandle,
}

/// Connection that the process has.
struct OpenConnection {
    state: Arc<FunctionState>,
    _in_use: ProcessUse,
    permit: BoxConnectionPermit,
}

impl fmt::Debug for OpenConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenConnection").finish_non_exhaustive()
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        // The last of its requests are in the process's log and counts.
        self.state.ran.store(true, Ordering::Release);
    }
}

impl DirectLink {
    /// Makes a link, and returns it with the end that is the process's. Must be called inside of
    /// the runtime.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = Channel::pair().map_err(io::Error::other)?;
        fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        // SAFETY: a channel owns its descriptor, and keeps it open as long as it lives.
        let socket = Arc::new(unsafe { AsyncFd::register(ours) }?);
        let open = OpenConnections::default();
        let listening = tokio::spawn(note_events(socket.clone(), open.clone()));
        let link = Self {
            socket,
            open,
            next: AtomicU64::new(0),
            listening: listening.abort_handle(),
        };
        Ok((link, theirs))
    }

    /// Notes that functions with open connections may have run.
    pub(crate) fn mark_running(&self) {
        for connection in self.open.lock().values() {
            connection.state.ran.store(true, Ordering::Release);
        }
    }

    async fn pass(&self, message: &DirectConnection, stream: &OwnedFd) -> Result<(), ChannelError> {
        loop {
            let ready = self.socket.writable().await;
            let mut ready = ready.map_err(|_| ChannelError::Closed)?;
            match self.socket.get_ref().send(message, &[stream.as_fd()]) {
                Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
                sent => return sent,
            }
        }
    }
}

impl Drop for DirectLink {
    fn drop(&mut self) {
        self.listening.abort();
        // Outside of the lock, as uses of the process end with them.
        let open = std::mem::take(&mut *self.open.lock());
        drop(open);
    }
}

/// Notes which connections the process has closed, and which are idle, until it is gone.
async fn note_events(socket: Arc<AsyncFd<Channel>>, open: OpenConnections) {
    while let Ok(mut ready) = socket.readable().await {
        match socket.get_ref().recv::<DirectEvent>() {
            Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
            Ok((DirectEvent::Closed(closed), _)) => {
                let closed = open.lock().remove(&closed.id);
                drop(closed);
            }
            Ok((DirectEvent::Activity(activity), _)) => {
                if let Some(connection) = open.lock().get_mut(&activity.id) {
                    connection.permit.set_busy(activity.is_busy);
                }
            }
            Err(_) => break,
        }
    }
    let all = std::mem::take(&mut *open.lock());
    drop(all);
}

/// Order that sets how a function answers direct requests.
pub(super) fn publish(record: &FunctionRecord) -> ControlRequest {
    ControlRequest::Publish {
        function: record.name.clone(),
        access: match (record.public, record.enabled) {
            (false, _) => DirectAccess::Hidden,
            (true, false) => DirectAccess::Disabled,
            (true, true) => DirectAccess::Public,
        },
    }
}

impl Functions {
    /// Hands a client's connection over to the process of a function, which is started, and in
    /// which the function is loaded, if need be. Nothing must have been read from it; `host` is
    /// that of its first request. `permit` is dropped when the connection is closed.
    pub async fn hand_over(
        &self,
        record: &FunctionRecord,
        host: &str,
        stream: &OwnedFd,
        permit: BoxConnectionPermit,
    ) -> Result<(), FunctionError> {
        let owner = self.existing_owner(record.owner.as_deref(), &record.name)?;
        let state = owner.function(&record.name)?;
        let in_use = self.loaded(&owner, &record.name).await?;
        let link = in_use.0.direct().await?;
        let id = link.next.fetch_add(1, Ordering::Relaxed);
        let message = DirectConnection {
            id,
            function: record.name.clone(),
            host: host.to_owned(),
        };
        let connection = OpenConnection {
            state,
            _in_use: in_use,
            permit,
        };
        // Before it can be closed.
        link.open.lock().insert(id, connection);
        let passed = tokio::time::timeout(HAND_OVER_TIMEOUT, link.pass(&message, stream)).await;
        if let Ok(Ok(())) = passed {
            return Ok(());
        }
        let refused = link.open.lock().remove(&id);
        drop(refused);
        let message = "their process does not take the connection".to_owned();
        Err(FunctionError::Unavailable(message))
    }
}
