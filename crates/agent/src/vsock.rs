//! vsock sockets for tokio. vsock is the socket family between a virtual machine and its host.
//!
//! Only `read`, `write`, `shutdown` and `SO_ERROR` are used on a connected socket. They do not
//! depend on the address family, so connections can be represented as tokio's `UnixStream`.

use crate::sys;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

/// Context id of the host.
pub const HOST_CID: u32 = libc::VMADDR_CID_HOST;

/// Length of a socket address.
const LENGTH: libc::socklen_t = size_of::<libc::sockaddr_vm>() as libc::socklen_t;

/// Returns the address of a port of the machine with the context id `cid`.
fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: sockaddr_vm consists of integers, for which all zeroes are valid.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

/// Creates a non-blocking socket.
fn socket() -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    sys::owned(unsafe {
        libc::socket(
            libc::AF_VSOCK,
            libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            0,
        )
    })
}

/// Starts to connect to a port of the host. [`finish`] waits for the result.
pub fn begin_connect(port: u32) -> io::Result<OwnedFd> {
    let socket = socket()?;
    let to = address(HOST_CID, port);
    // SAFETY: `to` is a sockaddr_vm of the given length.
    let result =
        sys::check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const to).cast(), LENGTH) });
    match result {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(e),
        _ => Ok(socket),
    }
}

/// Waits until a connection of [`begin_connect`] is established.
pub async fn finish(socket: OwnedFd) -> io::Result<UnixStream> {
    let stream = UnixStream::from_std(std::os::unix::net::UnixStream::from(socket))?;
    // The socket becomes writable when the connection is established or has failed.
    stream.writable().await?;
    match stream.take_error()? {
        Some(e) => Err(e),
        None => Ok(stream),
    }
}

/// A listening vsock port that accepts only connections of the host.
pub struct VsockListener {
    socket: AsyncFd<OwnedFd>,
}

impl VsockListener {
    /// Binds the port and listens on it.
    pub fn bind(port: u32) -> io::Result<Self> {
        let socket = socket()?;
        let at = address(libc::VMADDR_CID_ANY, port);
        // SAFETY: `at` is a sockaddr_vm of the given length.
        sys::check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const at).cast(), LENGTH) })?;
        // SAFETY: the call takes no pointers.
        sys::check(unsafe { libc::listen(socket.as_raw_fd(), 1024) })?;
        Ok(Self {
            socket: sys::register(socket, Interest::READABLE)?,
        })
    }

    /// Accepts the next connection. Connections from the guest (vsock loopback) are closed
    /// immediately, since any process could act as the host.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        loop {
            let mut ready = self.socket.readable().await?;
            let accepted = ready.try_io(|socket| {
                let mut peer = address(0, 0);
                let mut length = LENGTH;
                // SAFETY: `peer` and `length` describe a writable sockaddr_vm.
                let fd = sys::owned(unsafe {
                    libc::accept4(
                        socket.as_raw_fd(),
                        (&raw mut peer).cast(),
                        &mut length,
                        libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
                    )
                })?;
                Ok((fd, peer.svm_cid))
            });
            match accepted {
                Ok(Ok((fd, HOST_CID))) => {
                    return UnixStream::from_std(std::os::unix::net::UnixStream::from(fd));
                }
                Ok(Ok(_)) | Err(_) => continue,
                Ok(Err(e)) => return Err(e),
            }
        }
    }
}
