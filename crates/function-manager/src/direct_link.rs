//! Link over which a tenant's process receives client connections that the process then serves
//! without the daemon.
//!
//! A *tenant* is one owner of functions. The *maintenance pass* runs twice per second. It reads the
//! log and the metrics of each function that ran since the last pass from the process.

use crate::function_error::FunctionError;
use crate::function_state::FunctionState;
use crate::use_count::CountedUse;
use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::function::{DirectConnection, DirectEvent};
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

/// Timeout for passing a connection to the process.
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(5);

/// Resources that an open connection occupies.
pub trait ConnectionPermit: Send + Sync {
    /// Called when the connection has become idle, and when it has become busy again. Short changes
    /// are not reported. A new connection is busy.
    fn set_busy(&mut self, is_busy: bool);
}

/// Boxed [`ConnectionPermit`].
pub type BoxConnectionPermit = Box<dyn ConnectionPermit>;

/// Open connections by id.
type OpenConnections = Arc<Mutex<HashMap<u64, OpenConnection>>>;

/// Socket over which a process receives connections. When this value is dropped, the process closes
/// its connections after the requests in flight.
#[derive(Debug)]
pub(crate) struct DirectLink {
    socket: Arc<AsyncFd<Channel>>,
    open: OpenConnections,
    /// Number of the next connection.
    next: AtomicU64,
    /// Task that handles the reports of the process.
    events: AbortHandle,
}

/// Connection that the process serves.
pub(crate) struct OpenConnection {
    state: Arc<FunctionState>,
    /// Prevents the process from being stopped as idle.
    _in_use: CountedUse,
    permit: BoxConnectionPermit,
}

impl OpenConnection {
    pub(crate) fn new(
        state: Arc<FunctionState>,
        in_use: CountedUse,
        permit: BoxConnectionPermit,
    ) -> Self {
        Self {
            state,
            _in_use: in_use,
            permit,
        }
    }
}

impl fmt::Debug for OpenConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenConnection").finish_non_exhaustive()
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        // The log entries and metrics of the last requests are still in the process. The flag
        // causes the next maintenance pass to read them.
        self.state.ran.store(true, Ordering::Release);
    }
}

impl DirectLink {
    /// Creates a link, and returns the link and the process's end of the socket. Must be called
    /// inside a runtime.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let (daemon_end, process_end) = Channel::pair().map_err(io::Error::other)?;
        fcntl(&daemon_end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        // SAFETY: a channel owns its descriptor, and keeps the descriptor open until it is dropped.
        let socket = Arc::new(unsafe { AsyncFd::register(daemon_end) }?);
        let open = OpenConnections::default();
        let events = tokio::spawn(process_events(socket.clone(), open.clone()));
        let link = Self {
            socket,
            open,
            next: AtomicU64::new(0),
            events: events.abort_handle(),
        };
        Ok((link, process_end))
    }

    /// Marks the functions with open connections as run, so that their logs and metrics are read.
    pub(crate) fn mark_run(&self) {
        for connection in self.open.lock().values() {
            // The flag is set in each maintenance pass, because the process does not report short
            // requests.
            connection.state.ran.store(true, Ordering::Release);
        }
    }

    /// Hands over the connection `stream` for a function to the process. `host` is the host of the
    /// first request. `connection` is dropped when the connection is closed.
    pub(crate) async fn hand_over(
        &self,
        function: &str,
        host: &str,
        stream: &OwnedFd,
        connection: OpenConnection,
    ) -> Result<(), FunctionError> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let message = DirectConnection {
            id,
            function: function.to_owned(),
            host: host.to_owned(),
        };
        // The connection is inserted first, because the process may report the closed connection at
        // any time.
        self.open.lock().insert(id, connection);
        let result = tokio::time::timeout(HAND_OVER_TIMEOUT, self.pass(&message, stream)).await;
        if let Ok(Ok(())) = result {
            return Ok(());
        }
        // The connection is dropped without the lock: see `DirectLink::drop`.
        let rejected = self.open.lock().remove(&id);
        drop(rejected);
        // The caller still has the connection, and answers the client itself.
        let message = "the process does not accept the connection".to_owned();
        Err(FunctionError::Unavailable(message))
    }

    /// Sends an open connection to the process, as a file descriptor over a Unix socket.
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
        self.events.abort();
        // The connections are dropped after the lock is released: dropping a connection ends a use
        // of the process, which may run other code.
        let open = std::mem::take(&mut *self.open.lock());
        drop(open);
    }
}

/// Handles reports of closed, idle and busy connections until the process disconnects.
async fn process_events(socket: Arc<AsyncFd<Channel>>, open: OpenConnections) {
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
    // The process has exited: its connections are closed.
    let all = std::mem::take(&mut *open.lock());
    drop(all);
}
