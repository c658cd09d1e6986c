//! Typed messages with descriptors over a `SOCK_SEQPACKET` Unix socket: the transport of
//! [`crate::vm`] and [`crate::function`].

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
    sendmsg, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Maximum length of a message in bytes.
pub const MAX_MESSAGE: usize = 64 * 1024;
/// Maximum number of descriptors in one message. This is the limit of the kernel (`SCM_MAX_FD`).
pub const MAX_FDS: usize = 253;

/// Error of a [`Channel`].
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The peer closed its end.
    #[error("the peer closed the control socket")]
    Closed,
    /// A socket call failed.
    #[error("control socket: {0}")]
    Io(#[from] Errno),
    /// The message is longer than [`MAX_MESSAGE`] or has more than [`MAX_FDS`] descriptors.
    #[error("control message too large: {0}")]
    TooLarge(String),
    /// The message does not have the expected form.
    #[error("invalid control message: {0}")]
    Malformed(#[from] serde_json::Error),
}

/// One end of a control socket.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// Creates a channel on a connected `SOCK_SEQPACKET` socket.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Creates two connected ends. Both are close-on-exec.
    pub fn pair() -> Result<(Self, OwnedFd), ChannelError> {
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )?;
        Ok((Self::new(ours), theirs))
    }

    /// Sends one message. The caller remains the owner of the descriptors.
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ChannelError> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MAX_MESSAGE || fds.len() > MAX_FDS {
            return Err(ChannelError::TooLarge(format!(
                "{} bytes, {} descriptors",
                bytes.len(),
                fds.len()
            )));
        }
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        // Without descriptors, the control message is omitted.
        let control: &[ControlMessage] = if raw.is_empty() {
            &[]
        } else {
            &[ControlMessage::ScmRights(&raw)]
        };
        let data = [IoSlice::new(&bytes)];
        loop {
            match sendmsg::<()>(
                self.socket.as_raw_fd(),
                &data,
                control,
                MsgFlags::MSG_NOSIGNAL,
                None,
            ) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => continue,
                // MSG_NOSIGNAL: the error is returned instead of a SIGPIPE.
                Err(Errno::EPIPE | Errno::ECONNRESET) => return Err(ChannelError::Closed),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Waits for one message. Returns the message and its descriptors.
    pub fn recv<T: DeserializeOwned>(&self) -> Result<(T, Vec<OwnedFd>), ChannelError> {
        // A longer packet is truncated, which is reported below.
        let mut buffer = vec![0u8; self.next_bytes()?.min(MAX_MESSAGE)];
        // The space suffices for all descriptors that the kernel transfers with one message.
        let mut space = cmsg_space!([RawFd; MAX_FDS]);
        let (len, fds, truncated) = loop {
            let mut data = [IoSliceMut::new(&mut buffer)];
            match recvmsg::<()>(
                self.socket.as_raw_fd(),
                &mut data,
                Some(&mut space),
                MsgFlags::MSG_CMSG_CLOEXEC,
            ) {
                Ok(message) => {
                    // The descriptors get an owner first, so that every error path closes them.
                    let mut fds = Vec::new();
                    for part in message.cmsgs()? {
                        if let ControlMessageOwned::ScmRights(raw) = part {
                            // SAFETY: the kernel has just installed these descriptors, so they have
                            // no other owner.
                            fds.extend(
                                raw.into_iter()
                                    .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
                            );
                        }
                    }
                    // MSG_CTRUNC: descriptors were lost, for example because this process has too
                    // many open.
                    let cut = message
                        .flags
                        .intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC);
                    break (message.bytes, fds, cut);
                }
                Err(Errno::EINTR) => continue,
                Err(Errno::ECONNRESET) => return Err(ChannelError::Closed),
                Err(e) => return Err(e.into()),
            }
        };
        // No message is empty, so an empty packet means the end.
        if len == 0 {
            return Err(ChannelError::Closed);
        }
        if truncated {
            return Err(ChannelError::TooLarge("the packet was truncated".into()));
        }
        Ok((serde_json::from_slice(&buffer[..len])?, fds))
    }

    /// Waits for a message and returns its length. Without the length, a buffer of the maximum
    /// length would have to be zeroed for each message.
    fn next_bytes(&self) -> Result<usize, ChannelError> {
        // With MSG_TRUNC, the length of the whole packet is returned, not of the part that was
        // read.
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_TRUNC;
        loop {
            match recvmsg::<()>(self.socket.as_raw_fd(), &mut [], None, flags) {
                Ok(message) => return Ok(message.bytes),
                Err(Errno::EINTR) => continue,
                Err(Errno::ECONNRESET) => return Err(ChannelError::Closed),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::Request;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_message_arrives_with_its_descriptors() {
        let (near, far) = Channel::pair().unwrap();
        let far = Channel::new(far);
        let (mut left, right) = UnixStream::pair().unwrap();
        near.send(&Request::Connect { port: 7 }, &[right.as_fd()])
            .unwrap();
        drop(right);
        let (request, mut fds) = far.recv::<Request>().unwrap();
        assert_eq!(request, Request::Connect { port: 7 });
        let mut stream = UnixStream::from(fds.remove(0));
        assert!(fds.is_empty());
        left.write_all(b"hi").unwrap();
        let mut got = [0; 2];
        stream.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hi");
    }

    #[test]
    fn a_closed_peer_and_garbage_are_distinguished() {
        let (near, far) = Channel::pair().unwrap();
        let far = Channel::new(far);
        near.send(&"not a request", &[]).unwrap();
        assert!(matches!(
            far.recv::<Request>(),
            Err(ChannelError::Malformed(_))
        ));
        drop(near);
        assert!(matches!(far.recv::<Request>(), Err(ChannelError::Closed)));
    }
}
