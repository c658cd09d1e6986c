//! Finds and resets TCP sockets over netlink: `linux/sock_diag.h`, `linux/inet_diag.h`.

use crate::sys;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

/// `SOCK_DIAG_BY_FAMILY`
const BY_FAMILY: u16 = 20;
/// `SOCK_DESTROY`
const DESTROY: u16 = 21;
/// Length of `struct nlmsghdr`: length, type, flags, sequence number, port.
const NETLINK_HEADER_BYTES: usize = 16;
/// Length of `struct inet_diag_sockid`: ports, addresses, interface, cookie.
const SOCKET_ID_BYTES: usize = 48;
/// Offset of the socket id in `struct inet_diag_msg`, including the netlink header.
const SOCKET_ID_OFFSET: usize = NETLINK_HEADER_BYTES + 4;
/// Bit mask of the states of `net/tcp_states.h` that are connections, out of the states 1 to 12.
/// `TCP_CLOSE` (7) and `TCP_LISTEN` (10) are not connections. A socket in `TCP_TIME_WAIT` (6) has
/// no owner and only answers incoming packets.
const CONNECTION_STATES: u32 = 0x1fff & !(1 | 1 << 6 | 1 << 7 | 1 << 10);
/// Size of the receive buffer. The kernel fills at most 32 KiB at a time.
const RECV_BUFFER_BYTES: usize = 64 * 1024;

/// A TCP socket, identified as in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpConnection {
    family: u8,
    id: [u8; SOCKET_ID_BYTES],
}

impl TcpConnection {
    /// Parses a message of the kernel about a socket (`struct inet_diag_msg`).
    fn parse(message: &[u8]) -> Option<Self> {
        Some(Self {
            family: *message.get(NETLINK_HEADER_BYTES)?,
            id: message
                .get(SOCKET_ID_OFFSET..SOCKET_ID_OFFSET + SOCKET_ID_BYTES)?
                .try_into()
                .ok()?,
        })
    }

    /// Returns the address at offset `at` of the socket id: 4 for the local address, 20 for the
    /// peer.
    fn address(&self, at: usize) -> IpAddr {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.id[at..at + 16]);
        if self.family == libc::AF_INET as u8 {
            let [a, b, c, d, ..] = bytes;
            return Ipv4Addr::new(a, b, c, d).into();
        }
        // An IPv6 socket may have an IPv4 connection.
        IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
    }

    /// Returns whether both ends of the connection are in the guest.
    pub fn is_loopback(&self) -> bool {
        self.address(4).is_loopback() && self.address(20).is_loopback()
    }

    /// Returns the address of the peer.
    pub fn remote(&self) -> SocketAddr {
        let port = u16::from_be_bytes([self.id[2], self.id[3]]);
        SocketAddr::new(self.address(20), port)
    }
}

/// Netlink socket in the network namespace of the thread that opened it.
pub struct SockDiag(OwnedFd);

impl SockDiag {
    /// Opens a socket.
    pub fn open() -> io::Result<Self> {
        // SAFETY: the call takes no pointers.
        sys::owned(unsafe {
            libc::socket(
                libc::AF_NETLINK,
                libc::SOCK_RAW | libc::SOCK_CLOEXEC,
                libc::NETLINK_SOCK_DIAG,
            )
        })
        .map(Self)
    }

    /// Returns all TCP connections of an address family.
    pub fn connections(&self, family: u8) -> io::Result<Vec<TcpConnection>> {
        let any = TcpConnection {
            family,
            id: [0; SOCKET_ID_BYTES],
        };
        let flags = libc::NLM_F_REQUEST | libc::NLM_F_DUMP;
        self.send(&request(BY_FAMILY, flags as u16, &any))?;
        let mut found = Vec::new();
        let mut buffer = vec![0; RECV_BUFFER_BYTES];
        loop {
            let length = sys::read(self.0.as_raw_fd(), &mut buffer)?;
            let mut rest = &buffer[..length];
            if rest.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            while let Some((kind, message, next)) = split(rest) {
                match i32::from(kind) {
                    // The kernel sends the sockets in several messages, followed by NLMSG_DONE.
                    libc::NLMSG_DONE => return Ok(found),
                    libc::NLMSG_ERROR => error_of(message)?,
                    _ => found.extend(TcpConnection::parse(message)),
                }
                rest = next;
            }
        }
    }

    /// Resets a connection. A connection that was closed meanwhile is not an error.
    pub fn destroy(&self, connection: &TcpConnection) -> io::Result<()> {
        let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK;
        self.send(&request(DESTROY, flags as u16, connection))?;
        let mut buffer = [0; 1024];
        let length = sys::read(self.0.as_raw_fd(), &mut buffer)?;
        match split(&buffer[..length]) {
            Some((kind, message, _)) if i32::from(kind) == libc::NLMSG_ERROR => {
                match error_of(message) {
                    Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
                    other => other,
                }
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Sends a request to the kernel.
    fn send(&self, message: &[u8]) -> io::Result<()> {
        sys::write(self.0.as_raw_fd(), message).map(drop)
    }
}

/// Builds a message with a `struct inet_diag_req_v2`.
fn request(kind: u16, flags: u16, of: &TcpConnection) -> Vec<u8> {
    let mut message = Vec::with_capacity(NETLINK_HEADER_BYTES + 8 + SOCKET_ID_BYTES);
    message.extend_from_slice(&((NETLINK_HEADER_BYTES + 8 + SOCKET_ID_BYTES) as u32).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(&flags.to_ne_bytes());
    // Sequence number and port are zero: there is one request at a time, and the kernel knows the
    // sender.
    message.extend_from_slice(&[0; 8]);
    // The fields are family, protocol, extensions, padding, states, and the socket id.
    message.extend_from_slice(&[of.family, libc::IPPROTO_TCP as u8, 0, 0]);
    message.extend_from_slice(&CONNECTION_STATES.to_ne_bytes());
    message.extend_from_slice(&of.id);
    message
}

/// Returns the type and payload of the first message, and the remaining bytes.
fn split(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let message = bytes
        .get(..length)
        .filter(|_| length >= NETLINK_HEADER_BYTES)?;
    let next = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, message, next))
}

/// Returns the result in an error message. The value 0 is an acknowledgement.
fn error_of(message: &[u8]) -> io::Result<()> {
    let code = message
        .get(NETLINK_HEADER_BYTES..NETLINK_HEADER_BYTES + 4)
        .and_then(|b| b.try_into().ok());
    match code.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_loopback_connection_is_found_and_recognised() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                continue;
            };
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let diag = SockDiag::open().unwrap();
            let family = match stream.local_addr().unwrap() {
                SocketAddr::V4(_) => libc::AF_INET,
                SocketAddr::V6(_) => libc::AF_INET6,
            };
            let all = diag.connections(family as u8).unwrap();
            let remote = stream.peer_addr().unwrap();
            let found: Vec<_> = all.iter().filter(|c| c.remote() == remote).collect();
            assert!(!found.is_empty());
            assert!(found.iter().all(|c| c.is_loopback()));
            // Listening sockets are not listed.
            assert!(all.iter().all(|c| c.remote().port() != 0));
        }
    }

    #[test]
    fn an_ipv4_connection_of_an_ipv6_socket_is_recognised() {
        // The local address is at byte 4 and the remote address at byte 20. Both are IPv4 addresses
        // of the form `::ffff:127.0.0.x`.
        let mut id = [0; SOCKET_ID_BYTES];
        for (at, last) in [(4, 1), (20, 9)] {
            id[at + 10..at + 16].copy_from_slice(&[0xff, 0xff, 127, 0, 0, last]);
        }
        let family = libc::AF_INET6 as u8;
        assert!(TcpConnection { family, id }.is_loopback());
        // The remote address becomes 10.0.0.9.
        id[32] = 10;
        assert!(!TcpConnection { family, id }.is_loopback());
    }
}
