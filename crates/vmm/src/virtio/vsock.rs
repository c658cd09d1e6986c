//! virtio-vsock (virtio 1.2 section 5.10): stream sockets between the guest and Unix streams on the
//! host.
//!
//! Every connection joins a pair of ports to one Unix stream. Bytes go from the stream directly
//! into the guest's receive buffers and from its transmit buffers directly into the stream. Only
//! bytes that a slow host does not take at once are kept, never more than the credit that the guest
//! was given (256 KiB, `credit::BUF_ALLOC_BYTES`). Bytes that the guest sent before it closed still
//! reach the host, for as long as the host keeps its end open. A guest can therefore make the
//! process keep at most [`MAX_CONNECTIONS`] times that much, and only of what the host does not
//! read. A guest that asks for connections without end is not read from meanwhile
//! (`connect_limit`).
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

/// Most connections at a time, those being set up and torn down included; more are refused.
pub const MAX_CONNECTIONS: usize = 1024;

/// Receiver of the host's end of connections that the guest opens.
pub trait GuestConnect: Send {
    /// The guest connected to `port` on the host. An error refuses the connection.
    fn guest_connect(&mut self, port: u32, stream: UnixStream) -> std::io::Result<()>;
}

impl<F: FnMut(u32, UnixStream) -> std::io::Result<()> + Send> GuestConnect for F {
    fn guest_connect(&mut self, port: u32, stream: UnixStream) -> std::io::Result<()> {
        self(port, stream)
    }
}

/// Failure to connect to a port in the guest. The stream is closed without a byte.
#[derive(Debug, thiserror::Error)]
pub enum VsockConnectError {
    /// The guest's driver is not up (yet).
    #[error("the guest's vsock driver is not ready")]
    NotActive,
    /// [`MAX_CONNECTIONS`] reached.
    #[error("the guest has {MAX_CONNECTIONS} vsock connections, the most there can be")]
    TooMany,
    /// The stream cannot be watched.
    #[error("the stream for the guest cannot be watched: {0}")]
    Stream(nix::errno::Errno),
    /// The device failed while it passed the request on; equivalent to an error of `queue_event`.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
