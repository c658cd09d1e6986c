//! [`Connector`]: opens streams to a guest. Its VMM connects them to the guest over vsock.

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

/// Timeout of a connection request to a VMM.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Send buffer of both ends in bytes, before the kernel doubles the value. Equals the amount of
/// data that the guest may send ahead (`BUF_ALLOC_BYTES` in vmm), so that the VMM does not buffer
/// data.
const SEND_BUFFER_BYTES: usize = 256 * 1024;

/// Error of opening a stream to the guest.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Creating the socket pair failed.
    #[error("cannot create a socket pair: {0}")]
    Host(#[from] io::Error),
    /// The VMM did not accept the request in time.
    #[error("the sandbox's VMM did not accept a connection within {} s", CONNECT_TIMEOUT.as_secs())]
    Busy,
    /// The VMM has exited.
    #[error("the sandbox has ended: {0}")]
    Gone(#[from] ChannelError),
}

/// Connector for streams to one guest.
#[derive(Debug, Clone)]
pub struct Connector {
    pub(super) link: Arc<ControlSocket>,
    pub(super) gate: ConnectGate,
}

/// Write-locked during a rollback. The rolled-back guest drops all earlier streams without notice,
/// so a stream opened during the rollback would wait forever.
pub(crate) type ConnectGate = Arc<RwLock<()>>;

impl Connector {
    /// Opens a stream to vsock `port` in the guest. If the guest rejects the connection, reads
    /// return the end of the stream. Waits for a VMM that is busy with other connections, and for
    /// the end of a rollback.
    pub async fn connect(&self, port: u32) -> Result<UnixStream, ConnectError> {
        let opened = async {
            let _open = self.gate.read().await;
            self.open(port).await
        };
        tokio::time::timeout(CONNECT_TIMEOUT, opened)
            .await
            .map_err(|_| ConnectError::Busy)?
    }

    /// Opens a stream to a vsock port of the guest.
    async fn open(&self, port: u32) -> Result<UnixStream, ConnectError> {
        // Both ends are blocking here. The VMM uses `MSG_DONTWAIT` and does not change the mode of
        // its end.
        let (ours, theirs) = BlockingStream::pair()?;
        for end in [&ours, &theirs] {
            // Ignore the error: with a smaller buffer, streams are only slower.
            let _ = setsockopt(end, sockopt::SndBuf, &SEND_BUFFER_BYTES);
        }
        let request = Request::Connect { port };
        let fds = [theirs.as_fd()];
        self.link.send_when_writable(&request, &fds).await?;
        // The VMM has a duplicate of `theirs`. This process closes `theirs` on return.
        ours.set_nonblocking(true)?;
        Ok(UnixStream::from_std(ours)?)
    }
}
