//! [`VmmLink`]: the packet socket between the fetcher and one VMM.
//!
//! The *fetcher* is the process of this host that downloads missing memory of guests from the
//! store. A VMM requests chunks by number.

use jiffy_proto::fetch::{FetchAnswer, FetchRequest, MessageError, REQUEST_BYTES};
use nix::sys::socket::{MsgFlags, recv, send};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use tokio::io::unix::AsyncFd;

/// Registers a non-blocking descriptor with the event loop.
pub(super) fn registered(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: An `OwnedFd` always refers to the same descriptor and closes it only when dropped.
    let registered = unsafe { AsyncFd::register(fd) };
    registered.map_err(|e| e.into_parts().1)
}

/// Connection to a VMM, which may be hostile.
#[derive(Debug)]
pub struct VmmLink(AsyncFd<OwnedFd>);

impl VmmLink {
    /// Wraps a connected non-blocking socket. Must be called inside a tokio runtime.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        registered(socket).map(Self)
    }

    /// Receives a request. `None` if the VMM closed the connection. Cancel-safe.
    pub async fn request(&self) -> io::Result<Option<FetchRequest>> {
        // The buffer has one byte more than a request, to detect messages that are too long.
        let mut message = [0; REQUEST_BYTES + 1];
        let length = loop {
            let mut ready = self.0.readable().await?;
            let received = ready.try_io(|socket| {
                let length = recv(socket.as_raw_fd(), &mut message, MsgFlags::MSG_DONTWAIT);
                length.map_err(io::Error::from)
            });
            match received {
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(received) => break received?,
                Err(_would_block) => {}
            }
        };
        let message = message.get(..length).unwrap_or_default();
        if message.is_empty() {
            return Ok(None);
        }
        let decoded = FetchRequest::decode(message);
        decoded
            .map(Some)
            .map_err(|e: MessageError| io::Error::other(e))
    }

    /// Sends an answer.
    pub async fn answer(&self, answer: &FetchAnswer) -> io::Result<()> {
        let message = answer.encode();
        loop {
            let mut ready = self.0.writable().await?;
            let sent = ready.try_io(|socket| {
                let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                send(socket.as_raw_fd(), &message, flags).map_err(io::Error::from)
            });
            match sent {
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(sent) => return sent.map(drop),
                Err(_would_block) => {}
            }
        }
    }
}
