//! TCP connections with a deadline and cancellation.
//!
//! The parent of a puller opens these connections, because the puller itself cannot open sockets.

use crate::cancel::{Cancel, Interrupted};
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, connect, getsockopt, socket,
    sockopt,
};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Timeout of a connection.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a nonblocking TCP socket in the network namespace of this thread.
pub(crate) fn open(ipv6: bool) -> io::Result<OwnedFd> {
    let family = if ipv6 {
        AddressFamily::Inet6
    } else {
        AddressFamily::Inet
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    Ok(socket(family, SockType::Stream, flags, SockProtocol::Tcp)?)
}

/// Connects a nonblocking socket. Waits until the connection is established or an error occurs.
pub(crate) fn connect_to(
    socket: OwnedFd,
    address: SocketAddr,
    cancel: &Cancel,
) -> io::Result<TcpStream> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => {}
        // The kernel continues to connect in both cases (connect(2)).
        Err(Errno::EINPROGRESS | Errno::EINTR) => {
            let waited = cancel.wait(socket.as_fd(), PollFlags::POLLOUT, deadline);
            waited.map_err(|why| match why {
                Interrupted::Deadline => io::ErrorKind::TimedOut.into(),
                Interrupted::Cancelled => io::Error::other("cancelled"),
                Interrupted::Failed(e) => e.into(),
            })?;
            // The socket is writable after success and after failure.
            match getsockopt(&socket, sockopt::SocketError)? {
                0 => {}
                code => return Err(io::Error::from_raw_os_error(code)),
            }
        }
        Err(e) => return Err(e.into()),
    }
    Ok(TcpStream::from(socket))
}
