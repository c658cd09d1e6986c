//! virtio-vsock (virtio 1.2 section 5.10): stream sockets between the guest and Unix streams on the host.
//!
//! Every connection joins a pair of ports to one Unix stream. Bytes go from the stream straight into the guest's
//! receive buffers and from its transmit buffers straight into the stream; only what a slow host does not take at
//! once is kept, never more than the credit that the guest was given (256 KiB, `credit::BUF_ALLOC`). What the guest sent
//! before it closed still reaches the host, for as long as the host keeps its end open. A guest can therefore make
//! the process keep at most [`MAX_CONNECTIONS`] times that much, and only of what the host does not read.
//!
//! ```text
//! queues <-> device (rings, interrupts, timer) <-> muxer (who is next, who is who) <-> connection <-> Unix stream
//! ```

mod backlog;
mod connection;
mod credit;
mod device;
mod header;
mod muxer;
mod socket;
#[cfg(test)]
mod tests;

pub use device::Vsock;
pub use header::{HEADER_LEN, HOST_CID, Header, Op};
pub use jiffy_proto::vm::VsockConfig;

use super::DeviceError;
use std::os::unix::net::UnixStream;

/// Most connections at a time, those being set up and torn down included; more are refused.
pub const MAX_CONNECTIONS: usize = 1024;

/// Takes the host's end of connections that the guest opens.
pub trait GuestConnect: Send {
    /// The guest connected to `port` on the host. An error refuses the connection.
    fn guest_connect(&mut self, port: u32, stream: UnixStream) -> std::io::Result<()>;
}

impl<F: FnMut(u32, UnixStream) -> std::io::Result<()> + Send> GuestConnect for F {
    fn guest_connect(&mut self, port: u32, stream: UnixStream) -> std::io::Result<()> {
        self(port, stream)
    }
}

/// Why the host could not reach into the guest. The stream is closed without a byte.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The guest's driver is not up (yet).
    #[error("the guest's vsock driver is not ready")]
    NotActive,
    /// [`MAX_CONNECTIONS`] reached.
    #[error("the guest has {MAX_CONNECTIONS} vsock connections, the most there can be")]
    TooMany,
    /// The stream cannot be watched.
    #[error("the stream for the guest cannot be watched: {0}")]
    Stream(nix::errno::Errno),
    /// The device failed while it passed the request on; treat it like an error of `queue_event`.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
