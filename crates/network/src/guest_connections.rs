//! TCP connections from the daemon to servers in a guest, over the guest's interface.
//!
//! The guest's end of a connection is not closed when a guest is terminated. After a rollback, the
//! guest may have a connection with the same ports in another state. Therefore the daemon aborts
//! all its connections when their guest is terminated or rolled back.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! The *epoch* counts how often all connections were aborted. A connection that was opened in an
//! earlier epoch is aborted as well.

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

/// Timeout of a connection attempt. A server with a full backlog, or a guest that drops packets,
/// does not answer in time. The caller then connects through the agent, which can wait longer.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(250);
/// Time without further attempts after an attempt without an answer.
const SILENCE_PAUSE: Duration = Duration::from_secs(5);
/// Size of the buffer of each direction, which the kernel doubles. It bounds the memory for a
/// client that does not read.
const BUFFER_BYTES: u32 = 256 * 1024;

/// Open connections to one guest.
#[derive(Debug, Default)]
pub(crate) struct GuestConnections(Arc<Mutex<ConnectionsState>>);

/// State of the connections to one guest.
#[derive(Debug, Default)]
struct ConnectionsState {
    /// Number of times that all connections were aborted. A connection belongs to the guest only if
    /// the number has not changed since the attempt started.
    epoch: u64,
    /// Sockets of open connections by serial number. A socket is removed from this map before it is
    /// closed, because [`GuestStream`] drops its entry before its stream.
    open: HashMap<u64, RawFd>,
    /// Next serial number in `open`.
    next: u64,
    /// Time before which no attempts are made, because the guest, or a slot of an earlier version
    /// of Jiffy, did not answer.
    silent_until: Option<Instant>,
}

/// Registration of an open connection. Dropping this value removes the registration.
struct OpenConnection {
    of: Arc<Mutex<ConnectionsState>>,
    /// Number of the connection in the state.
    number: u64,
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.of.lock().open.remove(&self.number);
    }
}

impl GuestConnections {
    /// Connects to `port` of the guest in the slot with namespace `name`. `None` if no server
    /// accepts the connection in time, or during [`SILENCE_PAUSE`] after an unanswered attempt.
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
        let opened = opened
            .await
            .inspect_err(|e| tracing::debug!(error = %e, "cannot connect to a guest"));
        let connecting = opened.ok()?.connect((ADDRESS, port).into());
        // The lock is not held while waiting, so that `abort_all` never waits for a guest.
        let Ok(connected) = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await else {
            self.record_silence(epoch);
            return None;
        };
        self.register(connected.ok()?, epoch)
    }

    /// Pauses attempts after an attempt of `epoch` without an answer. Does nothing if the epoch has
    /// ended: the guest of the next one may answer.
    fn record_silence(&self, epoch: u64) {
        let mut state = self.0.lock();
        if state.epoch == epoch {
            state.silent_until = Some(Instant::now() + SILENCE_PAUSE);
        }
    }

    /// Registers a connection that was opened in `epoch`. If the epoch has ended, aborts the
    /// connection and returns `None`.
    fn register(&self, stream: TcpStream, epoch: u64) -> Option<GuestStream> {
        let mut state = self.0.lock();
        if state.epoch != epoch {
            abort(stream.as_fd());
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.open.insert(number, stream.as_raw_fd());
        let of = self.0.clone();
        let entry = Box::new(OpenConnection { of, number });
        Some(GuestStream::Direct { entry, stream })
    }

    /// Aborts all connections, including those in progress.
    pub fn abort_all(&self) {
        let mut state = self.0.lock();
        state.epoch += 1;
        state.silent_until = None;
        for fd in state.open.values() {
            // SAFETY: the descriptor is open: it is removed from the map, whose lock is held,
            // before it is closed.
            abort(unsafe { BorrowedFd::borrow_raw(*fd) });
        }
    }
}

/// Opens a socket in this thread's network namespace.
fn open() -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // Requests and responses are often small.
    socket.set_nodelay(true)?;
    socket.set_recv_buffer_size(BUFFER_BYTES)?;
    socket.set_send_buffer_size(BUFFER_BYTES)?;
    Ok(socket)
}

/// Shuts down a connection in both directions, so that pending reads and writes end. Sets the
/// linger time to 0, so that the later close resets the connection: a lingering socket would keep
/// the network namespace alive.
fn abort(stream: BorrowedFd<'_>) {
    let at_once = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    // Ignore errors: the calls fail only for connections that have already ended.
    let _ = setsockopt(&stream, sockopt::Linger, &at_once);
    let _ = socket::shutdown(stream.as_raw_fd(), Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    /// Returns both ends of a TCP connection.
    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let (ours, theirs) = tokio::join!(TcpStream::connect(to), listener.accept());
        (ours.unwrap(), theirs.unwrap().0)
    }

    #[tokio::test]
    async fn aborted_connections_end_for_their_readers() {
        let connections = GuestConnections::default();
        let (ours, mut theirs) = pair().await;
        let mut stream = connections.register(ours, 0).unwrap();
        let reading = async {
            let mut received = Vec::new();
            stream.read_to_end(&mut received).await.map(|_| received)
        };
        let ((), received) = tokio::join!(async { connections.abort_all() }, reading);
        assert_eq!(received.unwrap(), b"");
        drop(stream);
        // The connection is reset or closed: no byte can be read.
        assert!(theirs.read_u8().await.is_err());
    }

    #[tokio::test]
    async fn a_connection_attempted_before_a_rollback_is_aborted() {
        let connections = GuestConnections::default();
        connections.abort_all();
        assert!(connections.register(pair().await.0, 0).is_none());
        assert!(connections.register(pair().await.0, 1).is_some());
    }

    #[test]
    fn silence_before_a_rollback_does_not_pause_later_attempts() {
        let connections = GuestConnections::default();
        connections.abort_all();
        connections.record_silence(0);
        assert_eq!(connections.0.lock().silent_until, None);
        connections.record_silence(1);
        assert!(connections.0.lock().silent_until.is_some());
    }

    #[tokio::test]
    async fn closed_connections_are_unregistered() {
        let connections = GuestConnections::default();
        for _ in 0..1000 {
            drop(connections.register(pair().await.0, 0));
        }
        assert!(connections.0.lock().open.is_empty());
    }
}
