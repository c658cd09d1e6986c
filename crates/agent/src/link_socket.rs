//! The agent's ports if there is no vsock: see `jiffy_proto::agent::LINK_SOCKET`.
//!
//! Programs of the sandbox can connect, too. The kernel's credentials of the peer tell them from
//! the host.

use jiffy_proto::agent::LINK_SOCKET;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as BlockingListener};
use tokio::net::unix::UCred;
use tokio::net::{UnixListener, UnixStream};

/// User and group of a peer that is no task of the sandbox (`SO_PEERCRED`): no task can have them.
const NO_ID: u32 = u32::MAX;

/// A port at which the host connects.
pub struct LinkListener(UnixListener);

impl LinkListener {
    /// Listens.
    pub fn bind(port: u32) -> io::Result<Self> {
        let address = SocketAddr::from_abstract_name(format!("{LINK_SOCKET}{port}"))?;
        let listener = BlockingListener::bind_addr(&address)?;
        listener.set_nonblocking(true)?;
        UnixListener::from_std(listener).map(Self)
    }

    /// Accepts the next connection of the host. Those of programs in the sandbox are closed at
    /// once: with them any process could act as the host.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        loop {
            let (stream, _) = self.0.accept().await?;
            if stream.peer_cred().is_ok_and(|peer| is_host(&peer)) {
                return Ok(stream);
            }
        }
    }
}

/// Returns true if a peer is the host. The process id alone does not suffice: that of a task that
/// has ended is 0, too.
fn is_host(peer: &UCred) -> bool {
    peer.uid() == NO_ID && peer.gid() == NO_ID && peer.pid().unwrap_or(0) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::AsyncReadExt;
    use tokio::time::timeout;

    /// A port of this test program's own: the names of abstract sockets are shared with other runs
    /// of it.
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
        let mut said = Vec::new();
        tokio::select! {
            accepted = listener.accept() => panic!("{accepted:?}"),
            closed = timeout(Duration::from_secs(10), stream.read_to_end(&mut said)) => {
                closed.unwrap().unwrap();
            }
        }
        assert!(said.is_empty());
    }
}
