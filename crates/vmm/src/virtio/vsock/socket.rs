//! Transfer between guest memory and a Unix stream, never blocking and never raising SIGPIPE.
//! `MSG_DONTWAIT` rather than `O_NONBLOCK`: the open file may be shared with the host, and its mode
//! must not change.

use crate::virtio::device::chain::GuestBuffers;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, Shutdown, sendmsg, shutdown};
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd};

/// Sends guest memory; returns the number of bytes that the stream took.
pub fn send_guest(stream: &OwnedFd, data: &GuestBuffers<'_>) -> Result<usize, Errno> {
    let mut pieces: Vec<libc::iovec> = data.iovecs().collect();
    let message = message(&mut pieces);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    retry(|| {
        // SAFETY: `message` names only `pieces`, and these only guest memory that `data` borrows.
        // The kernel merely reads it, and does not mind that the guest may write to it meanwhile.
        unsafe { libc::sendmsg(stream.as_raw_fd(), &message, flags) }
    })
}

/// Receives at most `limit` bytes into guest memory, one room after the other; returns their
/// number, 0 at the end of the stream.
pub fn receive_guest(
    stream: &OwnedFd,
    rooms: &[GuestBuffers<'_>],
    limit: usize,
) -> Result<usize, Errno> {
    let mut left = limit;
    let mut pieces: Vec<libc::iovec> = Vec::with_capacity(rooms.len());
    for mut piece in rooms.iter().flat_map(GuestBuffers::iovecs) {
        piece.iov_len = piece.iov_len.min(left);
        if piece.iov_len == 0 {
            break;
        }
        left -= piece.iov_len;
        pieces.push(piece);
    }
    let mut message = message(&mut pieces);
    retry(|| {
        // SAFETY: `message` names only `pieces`, and these only guest memory that `rooms` borrow
        // and of which we hold no Rust reference.
        unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) }
    })
}

/// Sends bytes of this process; returns the number that the stream took.
pub fn send_bytes(stream: &OwnedFd, first: &[u8], second: &[u8]) -> Result<usize, Errno> {
    let pieces = [IoSlice::new(first), IoSlice::new(second)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    loop {
        match sendmsg::<()>(stream.as_raw_fd(), &pieces, &[], flags, None) {
            Err(Errno::EINTR) => {}
            outcome => return outcome,
        }
    }
}

/// Shuts down one or both directions. The host notices even if it holds a copy of the descriptor.
pub fn shutdown_stream(stream: &OwnedFd, how: Shutdown) {
    // It fails only if the peer has closed, which ends both directions as well.
    let _ = shutdown(stream.as_raw_fd(), how);
}

fn message(pieces: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all-zero is a valid `msghdr`: no name, no pieces, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    message
}

fn retry(mut call: impl FnMut() -> isize) -> Result<usize, Errno> {
    loop {
        match Errno::result(call()) {
            Ok(count) => return usize::try_from(count).map_err(|_| Errno::EIO),
            Err(Errno::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
}
