//! Streams to a guest.

use crate::control_socket::ControlSocket;
use jiffy_proto::channel::ChannelError;
use jiffy_proto::vm::Request;
use nix::sys::socket::{setsockopt, sockopt};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as BlockingStream;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::RwLock;

/// Time for a VMM to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes that either end takes before the other has read, which the kernel doubles: as many as the
/// guest may send ahead, so that the VMM keeps none of them.
const SEND_BUFFER_BYTES: usize = 256 * 1024;

/// Failure to open a stream to the guest.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No socket pair.
    #[error("cannot make a socket pair: {0}")]
    Host(#[from] io::Error),
    /// The VMM takes no requests.
    #[error("the sandbox's VMM took no connection within {} s", CONNECT_TIMEOUT.as_secs())]
    Busy,
    /// The VMM is gone.
    #[error("the sandbox is gone: {0}")]
    Gone(#[from] ChannelError),
}

/// Opener of streams to one guest.
#[derive(Debug, Clone)]
pub struct Connector {
    pub(super) link: Arc<ControlSocket>,
    pub(super) gate: ConnectGate,
}

/// Held shut while the guest is put back to a snapshot: it forgets all streams when it runs again,
/// without a word to whoever has opened one meanwhile and waits for an answer.
pub(crate) type ConnectGate = Arc<RwLock<()>>;

impl Connector {
    /// Opens a stream to vsock `port` in the guest. A refused connection reads as closed. Waits for
    /// a VMM that is busy with other connections, and for the end of a rollback.
    pub async fn connect(&self, port: u32) -> Result<UnixStream, ConnectError> {
        let opened = async {
            let _open = self.gate.read().await;
            self.open(port).await
        };
        tokio::time::timeout(CONNECT_TIMEOUT, opened)
            .await
            .map_err(|_| ConnectError::Busy)?
    }

    async fn open(&self, port: u32) -> Result<UnixStream, ConnectError> {
        // The VMM sets the mode of its own end.
        let (ours, theirs) = BlockingStream::pair()?;
        for end in [&ours, &theirs] {
            // As far as the host allows; with less, streams are slower.
            let _ = setsockopt(end, sockopt::SndBuf, &SEND_BUFFER_BYTES);
        }
        let request = Request::Connect { port };
        let fds = [theirs.as_fd()];
        self.link.send_when_writable(&request, &fds).await?;
        ours.set_nonblocking(true)?;
        Ok(UnixStream::from_std(ours)?)
    }
}
