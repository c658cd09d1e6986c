//! Record of each guest's connections and attempted connections.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! The record has three sources:
//! - the kernel's connection tracking in the slot: deleted connections, and a dump of the open ones
//!   on request;
//! - the slot's nftables table, which logs rejected packets;
//! - the DNS server and the proxy, which report their requests.
//!
//! Recording delays no packet. A guest that creates entries faster than they are read loses lines
//! of its own record, and the lost lines are counted.

mod connection_sockets;
mod conntrack_delete;
mod flow;
#[cfg(test)]
mod kernel_message_tests;
mod line_ring;
mod netlink;
mod record;
mod refused_packet;

pub(crate) use connection_sockets::ConnectionSockets;
pub(crate) use conntrack_delete::delete;
pub(crate) use record::{CarriedBytes, ConnectionRecorder};
pub(crate) use refused_packet::statement;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::AbortHandle;

/// Pause after reading the kernel's messages. During a flood, the pause limits the cost to reading
/// the socket buffers once per pause.
const READ_PAUSE: Duration = Duration::from_millis(100);

/// Tasks that read the kernel's messages about one slot. Dropping this value stops them.
#[derive(Debug)]
pub(crate) struct RecordReader(Vec<AbortHandle>);

impl Drop for RecordReader {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

impl RecordReader {
    /// Starts the tasks. Must be called inside a tokio runtime.
    pub fn start(
        sockets: &ConnectionSockets,
        record: &Arc<ConnectionRecorder>,
    ) -> io::Result<Self> {
        let all = [&sockets.flows, &sockets.refused];
        let tasks = all.into_iter().flatten().map(|socket| {
            // SAFETY: an `OwnedFd` refers to the same open descriptor until its last owner is
            // dropped, and the `AsyncFd` is one of the owners.
            let socket =
                unsafe { AsyncFd::register_with_interest(socket.0.clone(), Interest::READABLE)? };
            Ok(tokio::spawn(read_all(socket, record.clone())).abort_handle())
        });
        tasks.collect::<io::Result<_>>().map(Self)
    }
}

/// Adds the kernel's messages to the record until the task is aborted.
async fn read_all(socket: AsyncFd<Arc<OwnedFd>>, record: Arc<ConnectionRecorder>) {
    // `readable` fails only if the runtime is shutting down.
    while let Ok(mut ready) = socket.readable().await {
        // `read_messages` reads all sockets of the slot, including this one. Without further
        // messages, wait until this socket is readable again.
        if !record.read_messages() {
            ready.clear_ready();
        }
        drop(ready);
        tokio::time::sleep(READ_PAUSE).await;
    }
}
