//! TCP connections from the daemon to servers in a guest, over the guest's interface.
//!
//! A guest that ends says nothing to those that wait for it, and one that is put back to a snapshot
//! may have a connection of the same ports at another point. So all connections are ended with the
//! guest, or the time of it, that they were made with.

use crate::NetError;
use crate::guest::ADDRESS;
use crate::namespace;
use crate::network_state::blocking;
use jiffy_engine_api::GuestStream;
use nix::sys::socket::{self, Shutdown, setsockopt, sockopt};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpSocket, TcpStream};

/// Time for a guest to take a connection. A server whose backlog is full, or a guest that drops
/// packets, does not: the agent knows better how to wait.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(250);
/// Time without further attempts after one that got no answer at all.
const SILENCE_PAUSE: Duration = Duration::from_secs(5);
/// Buffer of each direction, which the kernel doubles: a client that does not read costs no more.
const BUFFER_BYTES: u32 = 256 * 1024;

/// Connections to one guest.
#[derive(Debug, Default)]
pub(crate) struct GuestConnections(Arc<Mutex<ConnectionsState>>);

#[derive(Debug, Default)]
struct ConnectionsState {
    /// Number of times that all connections were ended.
    epoch: u64,
    /// Sockets of open connections, by a running number. Each is removed before it is closed.
    open: HashMap<u64, RawFd>,
    next: u64,
    /// No attempts before: the guest, or a slot of an earlier version, does not answer.
    silent_until: Option<Instant>,
}

/// A connection among those of its guest.
struct OpenConnection {
    of: Arc<Mutex<ConnectionsState>>,
    number: u64,
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.of.lock().open.remove(&self.number);
    }
}

impl GuestConnections {
    /// Connects to `port` of the guest in the slot of namespace `name`. None: nothing takes
    /// connections there.
    pub async fn connect(&self, name: String, port: u16) -> Option<GuestStream> {
        let epoch = {
            let mut state = self.0.lock();
            if state
                .silent_until
                .is_some_and(|until| Instant::now() < until)
            {
                return None;
            }
            state.silent_until = None;
            state.epoch
        };
        let opened = blocking(move || {
            namespace::enter(&name, || {
                open().map_err(NetError::host("opening a socket in a slot"))
            })
        });
        let opened = opened.await.inspect_err(|e| tracing::debug!("{e}"));
        let connecting = opened.ok()?.connect((ADDRESS, port).into());
        let Ok(connected) = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await else {
            self.0.lock().silent_until = Some(Instant::now() + SILENCE_PAUSE);
            return None;
        };
        self.enter(connected.ok()?, epoch)
    }

    /// Notes a connection that was begun in `epoch`; none, and its end, if that is over.
    fn enter(&self, stream: TcpStream, epoch: u64) -> Option<GuestStream> {
        let mut state = self.0.lock();
        if state.epoch != epoch {
            end(stream.as_fd());
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.open.insert(number, stream.as_raw_fd());
        let of = self.0.clone();
        let entry = Box::new(OpenConnection { of, number });
        Some(GuestStream::Direct { entry, stream })
    }

    /// Ends all connections, also those that are being made.
    pub fn end_all(&self) {
        let mut state = self.0.lock();
        state.epoch += 1;
        state.silent_until = None;
        for fd in state.open.values() {
            // SAFETY: the descriptor is open: it leaves the map, whose lock is held, before it is
            // closed.
            end(unsafe { BorrowedFd::borrow_raw(*fd) });
        }
    }
}

/// A socket of this thread's network namespace.
fn open() -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_nodelay(true)?;
    socket.set_recv_buffer_size(BUFFER_BYTES)?;
    socket.set_send_buffer_size(BUFFER_BYTES)?;
    Ok(socket)
}

/// Ends a connection for whoever reads or writes it. Nothing of it outlives its descriptor: a
/// socket in the kernel's hands would keep the namespace.
fn end(stream: BorrowedFd<'_>) {
    let at_once = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    // Fail only for connections that have ended.
    let _ = setsockopt(&stream, sockopt::Linger, &at_once);
    let _ = socket::shutdown(stream.as_raw_fd(), Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let (ours, theirs) = tokio::join!(TcpStream::connect(to), listener.accept());
        (ours.unwrap(), theirs.unwrap().0)
    }

    #[tokio::test]
    async fn the_end_of_a_guest_ends_its_connections_for_their_readers() {
        let connections = GuestConnections::default();
        let (ours, mut theirs) = pair().await;
        let mut stream = connections.enter(ours, 0).unwrap();
        let reading = async {
            let mut heard = Vec::new();
            stream.read_to_end(&mut heard).await.map(|_| heard)
        };
        let ((), heard) = tokio::join!(async { connections.end_all() }, reading);
        assert_eq!(heard.unwrap(), b"");
        drop(stream);
        // Reset or closed: there is nothing to read.
        assert!(theirs.read_u8().await.is_err());
    }

    #[tokio::test]
    async fn a_connection_begun_before_a_rollback_is_not_one_to_the_guest_after_it() {
        let connections = GuestConnections::default();
        connections.end_all();
        assert!(connections.enter(pair().await.0, 0).is_none());
        assert!(connections.enter(pair().await.0, 1).is_some());
    }

    #[tokio::test]
    async fn closed_connections_are_forgotten() {
        let connections = GuestConnections::default();
        for _ in 0..1000 {
            drop(connections.enter(pair().await.0, 0));
        }
        assert!(connections.0.lock().open.is_empty());
    }
}
