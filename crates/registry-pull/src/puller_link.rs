//! The parent's end of the socket to a puller process. The puller parses untrusted data, so its
//! messages are not trusted.
//!
//! The *puller* is the confined process that downloads images from registries.

use crate::cancel::{Cancel, Interrupted};
use crate::error::PullError;
use crate::wire::{self, HEADER_BYTES, KIND_DATA, KIND_JSON, PullRequest, PullResponse};
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{ControlMessage, MsgFlags, recv, sendmsg};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Timeout of sending a request to a puller.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// The parent's end of the socket. Messages of the puller are not trusted.
#[derive(Debug)]
pub(crate) struct PullerLink(UnixStream);

/// Message of a puller.
pub(crate) enum PullerMessage {
    Response(PullResponse),
    Data(Vec<u8>),
}

/// Converts the reason of an interrupted wait. `late` is the message of a timeout.
fn interrupted(late: &str) -> impl Fn(Interrupted) -> PullError {
    move |why| match why {
        Interrupted::Cancelled => PullError::Cancelled,
        Interrupted::Deadline => PullError::Slow(late.to_owned()),
        Interrupted::Failed(e) => PullError::Died(e.to_string()),
    }
}

impl PullerLink {
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }

    /// Closes the socket, so that a puller on a thread exits.
    #[cfg(feature = "testing")]
    pub fn shut(&self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }

    /// Sends a request, optionally with a descriptor.
    pub fn send(
        &self,
        request: &PullRequest,
        descriptor: Option<BorrowedFd<'_>>,
        cancel: &Cancel,
    ) -> Result<(), PullError> {
        let payload = serde_json::to_vec(request).map_err(|e| PullError::Start(e.into()))?;
        let mut frame = wire::header(KIND_JSON, payload.len()).to_vec();
        frame.extend(payload);
        let deadline = Instant::now() + SEND_TIMEOUT;
        let (mut rest, mut descriptor) = (&frame[..], descriptor);
        while !rest.is_empty() {
            let ready = cancel.wait(self.0.as_fd(), PollFlags::POLLOUT, deadline);
            ready.map_err(interrupted("the puller does not read requests"))?;
            let raw = descriptor.map(|d| [d.as_raw_fd()]);
            let rights = raw.as_ref().map(|fds| ControlMessage::ScmRights(fds));
            let sent = sendmsg::<()>(
                self.0.as_raw_fd(),
                &[IoSlice::new(rest)],
                rights.as_slice(),
                MsgFlags::MSG_NOSIGNAL,
                None,
            );
            match sent {
                // The descriptor is attached to the first byte.
                Ok(n) => (rest, descriptor) = (rest.get(n..).unwrap_or_default(), None),
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(e) => return Err(PullError::Died(e.to_string())),
            }
        }
        Ok(())
    }

    /// Receives the next message. `deadline` has the time and the message of the timeout error.
    pub fn receive(
        &self,
        deadline: &(Instant, String),
        cancel: &Cancel,
    ) -> Result<PullerMessage, PullError> {
        let mut head = [0; HEADER_BYTES];
        self.fill(&mut head, deadline, cancel)?;
        let violation = || PullError::Died("protocol violation".to_owned());
        let (kind, length) = wire::parse_header(head).ok_or_else(violation)?;
        // `parse_header` bounds the length, so a hostile puller cannot exhaust the memory.
        let mut payload = vec![0; length];
        self.fill(&mut payload, deadline, cancel)?;
        match kind {
            KIND_DATA => Ok(PullerMessage::Data(payload)),
            KIND_JSON => {
                let response = serde_json::from_slice(&payload).map_err(|_| violation())?;
                Ok(PullerMessage::Response(response))
            }
            _ => Err(violation()),
        }
    }

    /// Fills `buffer`, or fails at the deadline or a cancellation.
    fn fill(
        &self,
        mut buffer: &mut [u8],
        deadline: &(Instant, String),
        cancel: &Cancel,
    ) -> Result<(), PullError> {
        while !buffer.is_empty() {
            let ready = cancel.wait(self.0.as_fd(), PollFlags::POLLIN, deadline.0);
            ready.map_err(interrupted(&deadline.1))?;
            // Without a control buffer, the kernel discards descriptors sent by the puller.
            match recv(self.0.as_raw_fd(), buffer, MsgFlags::empty()) {
                // The puller has exited or closed its end.
                Ok(0) => return Err(PullError::Died(String::new())),
                Ok(n) => buffer = buffer.get_mut(n..).unwrap_or_default(),
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(e) => return Err(PullError::Died(e.to_string())),
            }
        }
        Ok(())
    }
}
