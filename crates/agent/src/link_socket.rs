//! The agent's ports on engines without vsock: see `jiffy_proto::agent::LINK_SOCKET`.
//!
//! Programs of the sandbox can connect as well. The kernel's credentials of the peer distinguish
//! them from the host.

use jiffy_proto::agent::LINK_SOCKET;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as BlockingListener};
use tokio::net::unix::UCred;
use tokio::net::{UnixListener, UnixStream};

/// User and group of a peer that is not a task of the sandbox (`SO_PEERCRED`). No task can have
/// these ids.
const NO_ID: u32 = u32::MAX;

/// A port for connections of the host.
pub struct LinkListener(UnixListener);

impl LinkListener {
    /// Binds the port and listens on it.
    pub fn bind(port: u32) -> io::Result<Self> {
        let address = SocketAddr::from_abstract_name(format!("{LINK_SOCKET}{port}"))?;
        let listener = BlockingListener::bind_addr(&address)?;
        listener.set_nonblocking(true)?;
        UnixListener::from_std(listener).map(Self)
    }

    /// Accepts the next connection of the host. Connections of programs in the sandbox are closed
    /// immediately, since any process could act as the host.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        loop {
            let (stream, _) = self.0.accept().await?;
            // The kernel recorded the credentials at the connect, so that the peer cannot change
            // them.
            if stream.peer_cred().is_ok_and(|peer| is_host(&peer)) {
                return Ok(stream);
            }
        }
    }
}

/// Returns whether a peer is the host. The process id alone does not suffice, because the process
/// id of an exited task is also 0.
fn is_host(peer: &UCred) -> bool {
    peer.uid() == NO_ID && peer.gid() == NO_ID && peer.pid().unwrap_or(0) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::AsyncReadExt;
    use tokio::time::timeout;

    /// Returns a port that only this test process uses. Other runs of the test use the same
    /// namespace of abstract sockets.
    fn port() -> u32 {
        1 << 20 | std::process::id()
    }

    #[tokio::test]
    async fn a_connection_of_a_program_is_closed_root_or_not() {
        let listener = LinkListener::bind(port()).unwrap();
        let name = format!("{LINK_SOCKET}{}", port());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let stream = std::os::unix::net::UnixStream::connect_addr(&address).unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut stream = UnixStream::from_std(stream).unwrap();
        let mut received = Vec::new();
        tokio::select! {
            accepted = listener.accept() => panic!("{accepted:?}"),
            closed = timeout(Duration::from_secs(10), stream.read_to_end(&mut received)) => {
                closed.unwrap().unwrap();
            }
        }
        assert!(received.is_empty());
    }
}
