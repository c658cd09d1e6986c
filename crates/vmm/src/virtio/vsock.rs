//! virtio-vsock (virtio 1.2 section 5.10): stream sockets between the guest and Unix streams on the
//! host.
//!
//! The *credit* of a connection is the number of bytes for which the receiver still has buffer
//! space. The *muxer* is the multiplexer of all connections of a guest.
//!
//! Every connection joins a pair of ports to one Unix stream. Bytes are copied directly from the
//! stream to the guest's receive buffers, and from the guest's transmit buffers to the stream. The
//! process only buffers bytes that a slow host does not accept at once. For each connection, they
//! never exceed the guest's credit (256 KiB, `credit::BUF_ALLOC_BYTES`).
//!
//! Bytes that the guest sent before closing still reach the host, as long as the host keeps its end
//! open. A guest can therefore make the process buffer at most [`MAX_CONNECTIONS`] times 256 KiB,
//! and only data that the host does not read. While a guest requests too many connections, the
//! device does not read from the guest (`connect_limit`).
//!
//! ```text
//! queues <-> device (rings, timer) <-> muxer (lookup, order) <-> connection <-> Unix stream
//! ```
mod connect_limit;
mod connection;
mod credit;
mod device;
mod header;
mod host_backlog;
mod muxer;
mod socket;
#[cfg(test)]
mod tests;
mod timer;

pub use device::Vsock;
pub use header::{HEADER_BYTES, HOST_CID, VsockHeader, VsockOp};
pub use jiffy_proto::vm::VsockConfig;

use super::DeviceError;
use std::os::unix::net::UnixStream;

/// Maximum number of connections, including those being established or closed. Further connections
/// are rejected.
pub const MAX_CONNECTIONS: usize = 1024;

/// Receiver of the host's end of connections that the guest opens.
pub trait GuestConnect: Send {
    /// Called when the guest connected to `port` on the host. An error rejects the connection.
    fn guest_connect(&mut self, port: u32, stream: UnixStream) -> std::io::Result<()>;
}

impl<F: FnMut(u32, UnixStream) -> std::io::Result<()> + Send> GuestConnect for F {
    fn guest_connect(&mut self, port: u32, stream: UnixStream) -> std::io::Result<()> {
        self(port, stream)
    }
}

/// Error of connecting to a port in the guest. The stream is closed without any data.
#[derive(Debug, thiserror::Error)]
pub enum VsockConnectError {
    /// The guest's driver is not active.
    #[error("the guest's vsock driver is not ready")]
    NotActive,
    /// [`MAX_CONNECTIONS`] is reached.
    #[error("the guest has {MAX_CONNECTIONS} vsock connections, the most there can be")]
    TooMany,
    /// The stream cannot be watched.
    #[error("the stream for the guest cannot be watched: {0}")]
    Stream(nix::errno::Errno),
    /// The device failed while it passed on the request. Equivalent to an error of `queue_event`.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
