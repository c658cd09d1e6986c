//! The puller's end of the socket to its parent: receives requests, and sends responses and data.
//!
//! The *puller* is the confined process that downloads images from registries.

use crate::error::PullFault;
use crate::wire::{
    self, DATA_CHUNK_BYTES, HEADER_BYTES, KIND_DATA, KIND_JSON, PullRequest, PullResponse,
};
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use std::io::{self, IoSliceMut, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Socket to the parent. It blocks, because a puller has no other work while its parent is busy.
pub(super) struct ParentSocket(UnixStream);

impl ParentSocket {
    pub fn new(socket: UnixStream) -> Self {
        Self(socket)
    }

    /// Receives the next request and the descriptor attached to it, if any.
    pub fn receive_request(&self) -> io::Result<(PullRequest, Option<OwnedFd>)> {
        let mut descriptor = None;
        let mut head = [0; HEADER_BYTES];
        self.fill(&mut head, &mut descriptor)?;
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let (kind, length) = wire::parse_header(head).ok_or_else(invalid)?;
        let mut payload = vec![0; length];
        self.fill(&mut payload, &mut descriptor)?;
        match kind {
            KIND_JSON => Ok((serde_json::from_slice(&payload)?, descriptor)),
            _ => Err(invalid()),
        }
    }

    /// Sends a response, or a request for a connection.
    pub fn send_response(&self, response: &PullResponse) -> io::Result<()> {
        self.send(KIND_JSON, &serde_json::to_vec(response)?)
    }

    /// Sends data of a response.
    pub fn data(&self, bytes: &[u8]) -> io::Result<()> {
        // The parent rejects frames with more than `wire::MAX_FRAME_BYTES`.
        let mut chunks = bytes.chunks(DATA_CHUNK_BYTES);
        chunks.try_for_each(|chunk| self.send(KIND_DATA, chunk))
    }

    /// Requests a TCP connection from the parent, since this process cannot create sockets.
    pub fn connect(&self, host: &str, port: u16) -> Result<TcpStream, PullFault> {
        let lost = |e: io::Error| PullFault::Broken(e.to_string());
        let host = host.to_owned();
        self.send_response(&PullResponse::Connect { host, port })
            .map_err(lost)?;
        match self.receive_request().map_err(lost)? {
            (PullRequest::Connected, Some(connection)) => {
                let stream = TcpStream::from(connection);
                stream.set_nonblocking(true).map_err(lost)?;
                Ok(stream)
            }
            _ => Err(PullFault::Unreachable("no connection".to_owned())),
        }
    }

    fn send(&self, kind: u8, payload: &[u8]) -> io::Result<()> {
        let mut socket = &self.0;
        socket.write_all(&wire::header(kind, payload.len()))?;
        socket.write_all(payload)
    }

    /// Fills `buffer`. Stores a received descriptor in `descriptor`.
    fn fill(&self, mut buffer: &mut [u8], descriptor: &mut Option<OwnedFd>) -> io::Result<()> {
        while !buffer.is_empty() {
            let mut space = nix::cmsg_space!([RawFd; 1]);
            let mut parts = [IoSliceMut::new(buffer)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let received = recvmsg::<()>(self.0.as_raw_fd(), &mut parts, Some(&mut space), flags);
            let received = match received {
                Err(Errno::EINTR) => continue,
                received => received?,
            };
            for message in received.cmsgs()? {
                if let ControlMessageOwned::ScmRights(descriptors) = message {
                    for raw in descriptors {
                        // SAFETY: the kernel has just created this descriptor for this process.
                        // A replaced descriptor is closed by its drop.
                        *descriptor = Some(unsafe { OwnedFd::from_raw_fd(raw) });
                    }
                }
            }
            let length = received.bytes;
            if length == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            buffer = buffer.get_mut(length..).unwrap_or_default();
        }
        Ok(())
    }
}
