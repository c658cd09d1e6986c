//! Transfers between guest memory and a Unix stream that never block and never raise SIGPIPE. They
//! use `MSG_DONTWAIT` instead of `O_NONBLOCK`: the host may share the open file, whose mode must
//! not change.

use crate::virtio::device::chain::GuestBuffers;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, Shutdown, sendmsg, shutdown};
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd};

/// Maximum number of vectors per system call (`UIO_MAXIOV`).
const MAX_IOVECS: usize = 1024;

/// Sends guest memory. Returns the number of bytes that the stream accepted.
pub fn send_guest(stream: &OwnedFd, data: &GuestBuffers<'_>) -> Result<usize, Errno> {
    let mut pieces: Vec<libc::iovec> = data.iovecs().collect();
    let message = message(&mut pieces);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    retry(|| {
        // SAFETY: `message` refers only to `pieces`, and these only to guest memory borrowed by
        // `data`. The kernel only reads it, and the guest may write to it concurrently.
        unsafe { libc::sendmsg(stream.as_raw_fd(), &message, flags) }
    })
}

/// Receives at most `limit` bytes into guest memory, filling `buffers` in order. Returns the number
/// of bytes, or 0 at the end of the stream.
pub fn receive_guest(
    stream: &OwnedFd,
    buffers: &[GuestBuffers<'_>],
    limit: usize,
) -> Result<usize, Errno> {
    let mut left = limit;
    let mut pieces: Vec<libc::iovec> = Vec::with_capacity(buffers.len());
    for mut piece in buffers.iter().flat_map(GuestBuffers::iovecs) {
        piece.iov_len = piece.iov_len.min(left);
        if piece.iov_len == 0 || pieces.len() == MAX_IOVECS {
            break;
        }
        left -= piece.iov_len;
        pieces.push(piece);
    }
    let mut message = message(&mut pieces);
    retry(|| {
        // SAFETY: `message` refers only to `pieces`, and these only to guest memory borrowed by
        // `buffers`, to which no Rust references exist.
        unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) }
    })
}

/// Sends bytes of this process. Returns the number of bytes that the stream accepted.
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

/// Shuts down one or both directions. The host notices it even if it holds a duplicate of the
/// descriptor.
pub fn shutdown_stream(stream: &OwnedFd, how: Shutdown) {
    // Ignore the error: the peer has closed, which ends both directions as well.
    let _ = shutdown(stream.as_raw_fd(), how);
}

/// Returns a message with these pieces of memory.
fn message(pieces: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: an all-zero `msghdr` is valid: no name, no pieces, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    message
}

/// Repeats a system call that a signal has interrupted.
fn retry(mut call: impl FnMut() -> isize) -> Result<usize, Errno> {
    loop {
        match Errno::result(call()) {
            Ok(count) => return usize::try_from(count).map_err(|_| Errno::EIO),
            Err(Errno::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::device::chain::next_chain;
    use crate::virtio::testing::{Ring, memory, writable};
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn more_buffers_than_one_call_can_fill_are_filled_partly() {
        let memory = memory(1 << 20);
        let mut ring = Ring::new(&memory, 0x1000, 128);
        let mut queue = ring.queue(true);
        let bytes: Vec<_> = (0..100).map(|at| writable(0x8_0000 + at, 1)).collect();
        for chain in 0..12 {
            ring.add_indirect(0x1_0000 + chain * 0x1000, &bytes);
        }
        let chains: Vec<_> = (0..12)
            .map(|_| next_chain(&mut queue, &memory).unwrap().unwrap())
            .collect();
        let buffers: Vec<_> = chains.into_iter().map(|chain| chain.writable).collect();
        let (mut host, device) = UnixStream::pair().unwrap();
        host.write_all(&[7; 1200]).unwrap();
        let device = OwnedFd::from(device);
        assert_eq!(receive_guest(&device, &buffers, 1200), Ok(MAX_IOVECS));
        assert_eq!(
            receive_guest(&device, &buffers, 1200),
            Ok(1200 - MAX_IOVECS)
        );
    }
}
