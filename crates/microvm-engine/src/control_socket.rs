//! [`ControlSocket`]: the daemon's end of the socket to one `jiffy-vmm` process, for tokio.

use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::vm::{Event, Request};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Controller's end of the socket.
#[derive(Debug)]
pub(crate) struct ControlSocket(AsyncFd<Channel>);

impl ControlSocket {
    /// Wraps a channel. Must be called inside a tokio runtime.
    pub fn new(channel: Channel) -> Result<Self, ChannelError> {
        // `AsyncFd` requires a non-blocking descriptor.
        fcntl(channel.as_fd(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let both = Interest::READABLE | Interest::WRITABLE;
        // SAFETY: a Channel owns its descriptor, always returns the same descriptor, and closes it
        // only when it is dropped.
        let fd = unsafe { AsyncFd::register_with_interest(channel, both) }
            .map_err(|e| e.into_parts().1)
            .map_err(errno)?;
        Ok(Self(fd))
    }

    /// Sends without waiting. Suitable for small and rare messages: a full socket means that the
    /// VMM hangs.
    pub fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        self.0.get_ref().send(request, fds)
    }

    /// Waits until the socket is writable and sends the request. Cancel-safe.
    pub async fn send_when_writable(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ChannelError> {
        loop {
            let mut ready = self.0.writable().await.map_err(errno)?;
            match self.send(request, fds) {
                // Other tasks may fill the socket between the check and the call.
                Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
                other => return other,
            }
        }
    }

    /// Waits for the next message. Cancel-safe.
    pub async fn recv(&self) -> Result<(Event, Vec<OwnedFd>), ChannelError> {
        loop {
            let mut ready = self.0.readable().await.map_err(errno)?;
            match self.0.get_ref().recv::<Event>() {
                Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
                other => return other,
            }
        }
    }
}

fn errno(error: std::io::Error) -> ChannelError {
    ChannelError::Io(Errno::from_raw(error.raw_os_error().unwrap_or(0)))
}
