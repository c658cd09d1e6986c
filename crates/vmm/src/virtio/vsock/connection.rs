//! One vsock connection: a pair of ports, a Unix stream, and the state of each side. The submodules
//! handle packets from the guest, packets to the guest, and events of the stream.
//!
//! REQUEST, RESPONSE, RST (reset) and SHUTDOWN are operations of packets (`VsockOp`). The *credit*
//! of a connection is the number of bytes for which the receiver still has buffer space. The
//! *backlog* contains bytes of the guest that the host has not read.

mod from_guest;
mod stream;
mod to_guest;

pub use to_guest::{MAX_PACKET_BYTES, OutgoingPacket};

use super::credit::Credit;
use super::header::VsockHeader;
use super::host_backlog::HostBacklog;
use super::socket::shutdown_stream;
use nix::sys::epoll::EpollFlags;
use nix::sys::socket::Shutdown;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Pair of ports that identifies a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortPair {
    pub guest: u32,
    pub host: u32,
}

/// Timeouts of replies from the guest.
#[derive(Debug, Clone, Copy)]
pub struct VsockTimeouts {
    /// Timeout of the reply to a connection request.
    pub connect: Duration,
    /// Timeout of the RST that confirms a SHUTDOWN of the device. Same value as Linux
    /// (`VSOCK_CLOSE_TIMEOUT`).
    pub close: Duration,
    /// Time without credit before a credit request is sent. Linux sends credit unprompted, so
    /// requests are rare.
    pub credit: Duration,
}

impl Default for VsockTimeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            close: Duration::from_secs(8),
            credit: Duration::from_millis(10),
        }
    }
}

/// Action required by an event of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum ConnectionAction {
    /// Retain the connection.
    Keep,
    /// Send an RST to the guest, and remove the connection.
    SendReset,
    /// Remove the connection. The guest knows already.
    Remove,
}

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum VsockConnectionState {
    /// The host connects to the guest. `request_sent` is set when the REQUEST was sent.
    Connecting { request_sent: bool },
    /// The guest connected to the host; the RESPONSE is not sent yet.
    Accepting,
    /// Established.
    Open,
    /// The host has closed, and the SHUTDOWN was sent. The guest's RST is pending.
    Closing,
    /// The guest has closed. Only the backlog remains to be sent to the host.
    Lingering,
}

/// State of the request for buffer space of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CreditRequestState {
    None,
    /// The guest has no buffer space. A request is due at the deadline.
    Delayed,
    Due,
    /// The request was sent. It is not repeated until the guest has buffer space again.
    Sent,
}

/// Connection between a stream of the host and a socket of the guest.
#[derive(Debug)]
pub struct VsockConnection {
    pub ports: PortPair,
    pub credit: Credit,
    /// True while the connection is in the muxer's queue of connections with packets to send.
    pub queued: bool,
    /// Time of the next call of [`VsockConnection::expire`].
    pub deadline: Option<Instant>,
    state: VsockConnectionState,
    /// Stream to the host. `None` after both directions have ended.
    stream: Option<OwnedFd>,
    /// Events for which the stream is watched. `None` if it is not watched.
    watched: Option<EpollFlags>,
    backlog: HostBacklog,
    /// True if the stream may be readable or at its end.
    readable: bool,
    /// True if the host has closed its sending side, and all of its bytes were sent to the guest.
    host_send_closed: bool,
    /// True if the host has closed its receiving side.
    host_receive_closed: bool,
    /// True if both directions of the stream have ended. Such a stream is not watched, because it
    /// would always be ready.
    hung_up: bool,
    /// `SHUT_*` flags received from the guest.
    guest_shut: u32,
    /// `SHUT_*` flags sent to the guest.
    sent_shutdown: u32,
    /// True if the guest requested a credit update that was not sent yet.
    update_requested: bool,
    credit_request: CreditRequestState,
}

impl VsockConnection {
    fn new(ports: PortPair, stream: OwnedFd, state: VsockConnectionState) -> Self {
        Self {
            ports,
            credit: Credit::default(),
            queued: false,
            deadline: None,
            state,
            stream: Some(stream),
            watched: None,
            backlog: HostBacklog::default(),
            readable: false,
            host_send_closed: false,
            host_receive_closed: false,
            hung_up: false,
            guest_shut: 0,
            sent_shutdown: 0,
            update_requested: false,
            credit_request: CreditRequestState::None,
        }
    }

    /// Creates a connection from the host. The guest must reply by `deadline`.
    pub fn connecting(ports: PortPair, stream: OwnedFd, deadline: Instant) -> Self {
        let mut connection = Self::new(
            ports,
            stream,
            VsockConnectionState::Connecting {
                request_sent: false,
            },
        );
        connection.deadline = Some(deadline);
        connection
    }

    /// Creates the connection that the guest requested with `request`.
    pub fn accepting(ports: PortPair, stream: OwnedFd, request: &VsockHeader) -> Self {
        let mut connection = Self::new(ports, stream, VsockConnectionState::Accepting);
        connection.credit.update(request);
        connection
    }

    /// Handles the expired deadline.
    pub fn expire(&mut self) -> ConnectionAction {
        self.deadline = None;
        match self.state {
            // The guest never learned of the connection.
            VsockConnectionState::Connecting {
                request_sent: false,
            } => ConnectionAction::Remove,
            VsockConnectionState::Connecting { request_sent: true }
            | VsockConnectionState::Closing => ConnectionAction::SendReset,
            VsockConnectionState::Open if self.credit_request == CreditRequestState::Delayed => {
                self.credit_request = CreditRequestState::Due;
                ConnectionAction::Keep
            }
            _ => ConnectionAction::Keep,
        }
    }

    /// Closes the guest's side. Returns whether the connection must remain until the backlog is
    /// sent.
    pub fn linger(&mut self) -> bool {
        self.state = VsockConnectionState::Lingering;
        self.deadline = None;
        // The guest accepts no more data, so the host must not send more.
        if let Some(stream) = &self.stream {
            shutdown_stream(stream, Shutdown::Read);
        }
        self.stream.is_some() && !self.backlog.is_empty()
    }
}
