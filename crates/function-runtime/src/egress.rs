//! Outgoing connections of guests. This process cannot create sockets: the *broker*, a thread of
//! the daemon, connects to a host, with TLS if requested. The broker passes one end of a Unix
//! socket pair, and relays the data between the other end and the host. Requests are denied without
//! a broker, and for functions without allowed hosts.

use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::function::{EgressFailure, EgressRequest, EgressResponse};
use nix::errno::Errno;
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::sync::oneshot;

/// Process's end of the socket pair, or the reason for its absence.
type Answer = Result<OwnedFd, EgressFailure>;
/// Requests without an answer, by id.
type Waiting = Mutex<HashMap<u64, oneshot::Sender<Answer>>>;

/// Connection to the broker of this process. `None` if no broker is attached.
#[derive(Debug, Default)]
pub(crate) struct Egress(RwLock<Option<Arc<BrokerLink>>>);

/// Connection to one broker.
#[derive(Debug)]
struct BrokerLink {
    socket: AsyncFd<Channel>,
    waiting: Waiting,
    /// Id of the next request.
    next: AtomicU64,
}

impl Egress {
    /// Uses the broker at the other end of `socket` from now on. Must be called inside a runtime.
    pub(crate) fn attach(self: &Arc<Self>, socket: OwnedFd) -> io::Result<()> {
        let flags = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK);
        nix::fcntl::fcntl(&socket, flags)?;
        let link = Arc::new(BrokerLink {
            // SAFETY: a channel owns its descriptor, and keeps the descriptor open until it is
            // dropped.
            socket: unsafe { AsyncFd::register(Channel::new(socket)) }?,
            waiting: Mutex::default(),
            next: AtomicU64::new(0),
        });
        *self.0.write() = Some(link.clone());
        let egress = self.clone();
        tokio::spawn(async move {
            link.pass_answers().await;
            // A restarted daemon may have attached another broker in the meantime.
            egress.detach(&link);
        });
        Ok(())
    }

    /// Removes a link that has ended, unless a newer link has replaced it.
    fn detach(&self, link: &Arc<BrokerLink>) {
        let mut current = self.0.write();
        if current
            .as_ref()
            .is_some_and(|current| Arc::ptr_eq(current, link))
        {
            *current = None;
        }
    }

    /// Requests a connection from the broker. With `tls`, the broker performs the TLS handshake.
    pub(crate) async fn connect(
        &self,
        function: &str,
        host: &str,
        port: u16,
        tls: bool,
    ) -> Result<UnixStream, EgressFailure> {
        let link = self.0.read().clone();
        let link = link.ok_or(EgressFailure::Denied)?;
        let request = EgressRequest {
            id: link.next.fetch_add(1, Ordering::Relaxed),
            function: function.to_owned(),
            host: host.to_owned(),
            port,
            tls,
        };
        let socket = link.request_connection(&request).await?;
        // The broker has made the socket non-blocking, as `from_std` requires. A failed
        // registration in the event loop is reported as too many connections.
        UnixStream::from_std(StdUnixStream::from(socket)).map_err(|_| EgressFailure::TooMany)
    }
}

/// Request that waits for its answer. Dropping this value removes the request.
struct WaitingConnection<'a>(&'a Waiting, u64);

impl Drop for WaitingConnection<'_> {
    fn drop(&mut self) {
        let mut waiting = self.0.lock();
        waiting.remove(&self.1);
    }
}

impl BrokerLink {
    fn waiting(&self) -> parking_lot::MutexGuard<'_, HashMap<u64, oneshot::Sender<Answer>>> {
        self.waiting.lock()
    }

    /// Sends a request to the broker, and waits for the answer.
    async fn request_connection(&self, request: &EgressRequest) -> Answer {
        // The entry must exist before the broker can answer.
        let (sender, receiver) = oneshot::channel();
        self.waiting().insert(request.id, sender);
        let _waiting = WaitingConnection(&self.waiting, request.id);
        loop {
            let mut ready = self
                .socket
                .writable()
                .await
                .map_err(|_| EgressFailure::Denied)?;
            match self.socket.get_ref().send(request, &[]) {
                Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
                sent => break sent.map_err(|_| EgressFailure::Denied)?,
            }
        }
        // The sender is dropped when the broker disconnects.
        receiver.await.unwrap_or(Err(EgressFailure::Denied))
    }

    /// Passes answers to the waiting requests until the broker disconnects.
    async fn pass_answers(&self) {
        loop {
            let Ok(mut ready) = self.socket.readable().await else {
                break;
            };
            match self.socket.get_ref().recv::<EgressResponse>() {
                Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
                Err(_) => break,
                Ok((response, mut files)) => {
                    let answer = match response.failure {
                        None => files.pop().ok_or(EgressFailure::Denied),
                        Some(failure) => Err(failure),
                    };
                    // Without a waiting request, the socket is closed.
                    if let Some(sender) = self.waiting().remove(&response.id) {
                        // The guest may have exited in the meantime.
                        let _ = sender.send(answer);
                    }
                }
            }
        }
        // Dropping the senders fails all waiting requests.
        self.waiting().clear();
    }
}
