//! One connection: a pair of ports, a Unix stream, and the state of each side.

use super::credit::Credit;
use super::header::{SHUT_BOTH, SHUT_RECEIVE, SHUT_SEND, VsockHeader, VsockOp};
use super::host_backlog::HostBacklog;
use super::socket::{receive_guest, send_guest, shutdown_stream};
use crate::poll::SlotPoller;
use crate::virtio::device::chain::GuestBuffers;
use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;
use nix::sys::socket::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Most data in one packet, as Linux has it (`VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`).
const MAX_PACKET_BYTES: usize = 64 * 1024;

/// Pair of ports that identifies a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortPair {
    pub guest: u32,
    pub host: u32,
}

/// Timeouts of answers from the guest.
#[derive(Debug, Clone, Copy)]
pub struct VsockTimeouts {
    /// Answer to a connection request.
    pub connect: Duration,
    /// RST that confirms our SHUTDOWN (Linux waits as long: `VSOCK_CLOSE_TIMEOUT`).
    pub close: Duration,
    /// Credit, before a credit request. Linux sends credit by itself, so a request is rarely
    /// needed.
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

/// Action on a connection after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum ConnectionAction {
    /// Keep it.
    Keep,
    /// Send an RST to the guest and free its ports.
    PendingReset,
    /// Free its ports; the guest knows already.
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum VsockConnectionState {
    /// The host connects to the guest; `asked`: the REQUEST was sent.
    Connecting { asked: bool },
    /// The guest connected to the host; the RESPONSE is not sent yet.
    Accepting,
    /// Established.
    Open,
    /// The host has closed and the SHUTDOWN was sent; only the guest's RST is missing.
    Closing,
    /// The guest has closed; only the backlog remains to be sent to the host.
    Lingering,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CreditRequestState {
    None,
    /// The guest has no room; a request is due at the deadline.
    Delayed,
    Due,
    /// Sent; not repeated before there was room.
    Sent,
}

/// Packet to the guest, without the fields that the muxer fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutgoingPacket {
    pub op: VsockOp,
    pub flags: u32,
    pub len: u32,
}

#[derive(Debug)]
pub struct VsockConnection {
    pub ports: PortPair,
    pub credit: Credit,
    /// True while it is in the muxer's queue of connections with packets to send.
    pub queued: bool,
    /// Time of the next call of [`VsockConnection::expire`].
    pub deadline: Option<Instant>,
    state: VsockConnectionState,
    /// Stream to the host; none once both directions have ended.
    stream: Option<OwnedFd>,
    /// Events that the stream is watched for; none: not watched.
    watched: Option<EpollFlags>,
    backlog: HostBacklog,
    /// The stream may be readable, or at its end.
    readable: bool,
    /// The host has closed its sending side, and all its bytes were sent to the guest.
    host_send_closed: bool,
    /// The host has closed its receiving side.
    host_receive_closed: bool,
    /// Both directions of the stream have ended; watching it would report it as ready for ever.
    hung_up: bool,
    /// `SHUT_*` flags received from the guest.
    guest_shut: u32,
    /// `SHUT_*` flags sent to the guest.
    sent_shutdown: u32,
    update_asked: bool,
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
            update_asked: false,
            credit_request: CreditRequestState::None,
        }
    }

    /// Creates a connection from the host; the guest must answer by `deadline`.
    pub fn connecting(ports: PortPair, stream: OwnedFd, deadline: Instant) -> Self {
        let mut connection = Self::new(
            ports,
            stream,
            VsockConnectionState::Connecting { asked: false },
        );
        connection.deadline = Some(deadline);
        connection
    }

    /// Creates the connection that the guest asked for with `request`.
    pub fn accepting(ports: PortPair, stream: OwnedFd, request: &VsockHeader) -> Self {
        let mut connection = Self::new(ports, stream, VsockConnectionState::Accepting);
        connection.credit.update(request);
        connection
    }

    /// Handles a packet from the guest; `data` follows the header.
    pub fn receive(
        &mut self,
        op: VsockOp,
        header: &VsockHeader,
        data: &mut GuestBuffers<'_>,
    ) -> ConnectionAction {
        if op == VsockOp::Rst {
            return ConnectionAction::End;
        }
        self.credit.update(header);
        if self.credit.room() > 0 && self.credit_request != CreditRequestState::None {
            self.credit_request = CreditRequestState::None;
            if self.state == VsockConnectionState::Open {
                self.deadline = None;
            }
        }
        match (self.state, op) {
            (VsockConnectionState::Connecting { asked: true }, VsockOp::Response) => {
                self.state = VsockConnectionState::Open;
                self.deadline = None;
                // The host has most likely written already; reading now saves a wakeup of the event
                // loop.
                self.readable = true;
                ConnectionAction::Keep
            }
            (VsockConnectionState::Connecting { .. } | VsockConnectionState::Lingering, _) => {
                ConnectionAction::PendingReset
            }
            (_, VsockOp::Request | VsockOp::Response) => ConnectionAction::PendingReset,
            (_, VsockOp::Rw) => self.receive_data(header.len, data),
            (_, VsockOp::Shutdown) => self.receive_shutdown(header.flags),
            (_, VsockOp::CreditRequest) => {
                self.update_asked = true;
                ConnectionAction::Keep
            }
            (_, VsockOp::CreditUpdate | VsockOp::Rst) => ConnectionAction::Keep,
        }
    }

    fn receive_data(&mut self, len: u32, data: &mut GuestBuffers<'_>) -> ConnectionAction {
        let data = usize::try_from(len).ok().and_then(|len| data.take(len));
        let Some(mut data) = data else {
            return ConnectionAction::PendingReset;
        };
        if self.guest_shut & SHUT_SEND != 0 || !self.credit.receive(len) {
            return ConnectionAction::PendingReset;
        }
        let stream = match &self.stream {
            Some(stream) if !self.host_receive_closed => stream,
            _ => {
                self.credit.forward(len);
                return ConnectionAction::Keep;
            }
        };
        let mut sent = 0;
        if self.backlog.is_empty() && len > 0 {
            sent = match send_guest(stream, &data) {
                Ok(sent) => sent,
                Err(Errno::EAGAIN) => 0,
                Err(_) => {
                    self.credit.forward(len);
                    self.host_receive_closed = true;
                    return ConnectionAction::Keep;
                }
            };
        }
        self.credit.forward(u32::try_from(sent).unwrap_or(len));
        if data.take(sent).is_some() && !data.is_empty() {
            self.backlog.push(&data);
        }
        ConnectionAction::Keep
    }

    fn receive_shutdown(&mut self, flags: u32) -> ConnectionAction {
        self.guest_shut |= flags & SHUT_BOTH;
        if self.guest_shut == SHUT_BOTH {
            return ConnectionAction::PendingReset;
        }
        if let Some(stream) = &self.stream {
            if self.guest_shut & SHUT_RECEIVE != 0 {
                self.readable = false;
                shutdown_stream(stream, Shutdown::Read);
            }
            if self.guest_shut & SHUT_SEND != 0 && self.backlog.is_empty() {
                shutdown_stream(stream, Shutdown::Write);
            }
        }
        ConnectionAction::Keep
    }

    /// Handles events of the stream.
    pub fn stream_event(&mut self, flags: EpollFlags) -> ConnectionAction {
        self.hung_up |= flags.intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR);
        if flags.contains(EpollFlags::EPOLLOUT) || self.hung_up {
            self.flush();
        }
        if self.hung_up {
            self.close_host_receive();
        }
        if flags.contains(EpollFlags::EPOLLIN) || self.hung_up {
            if self.guest_shut & SHUT_RECEIVE != 0 {
                self.host_send_closed |= self.hung_up;
            } else {
                self.readable = !self.host_send_closed;
            }
        }
        if self.state == VsockConnectionState::Lingering && self.backlog.is_empty() {
            return ConnectionAction::End;
        }
        ConnectionAction::Keep
    }

    fn flush(&mut self) {
        let (Some(stream), false) = (&self.stream, self.backlog.is_empty()) else {
            return;
        };
        match self.backlog.flush(stream) {
            Ok(bytes) => self.credit.forward(bytes),
            Err(_) => return self.close_host_receive(),
        }
        if self.backlog.is_empty() && self.guest_shut & SHUT_SEND != 0 {
            shutdown_stream(stream, Shutdown::Write);
        }
    }

    /// Drops the backlog: the host receives no more.
    fn close_host_receive(&mut self) {
        self.host_receive_closed = true;
        self.credit.forward(self.backlog.clear());
    }

    /// Handles the expired deadline.
    pub fn expire(&mut self) -> ConnectionAction {
        self.deadline = None;
        match self.state {
            VsockConnectionState::Connecting { asked: false } => ConnectionAction::End,
            VsockConnectionState::Connecting { asked: true } | VsockConnectionState::Closing => {
                ConnectionAction::PendingReset
            }
            VsockConnectionState::Open if self.credit_request == CreditRequestState::Delayed => {
                self.credit_request = CreditRequestState::Due;
                ConnectionAction::Keep
            }
            _ => ConnectionAction::Keep,
        }
    }

    /// Returns true if [`VsockConnection::next_packet`] may return a packet.
    pub fn has_packet(&self) -> bool {
        match self.state {
            VsockConnectionState::Connecting { asked } => !asked,
            VsockConnectionState::Accepting => true,
            VsockConnectionState::Open => {
                (self.can_read() && self.credit.room() > 0)
                    || self.shutdown_to_send() != self.sent_shutdown
                    || self.credit_request == CreditRequestState::Due
                    || self.needs_update()
            }
            VsockConnectionState::Closing | VsockConnectionState::Lingering => false,
        }
    }

    fn can_read(&self) -> bool {
        self.readable && !self.host_send_closed && self.guest_shut & SHUT_RECEIVE == 0
    }

    fn shutdown_to_send(&self) -> u32 {
        let send = if self.host_send_closed { SHUT_SEND } else { 0 };
        let receive = if self.host_receive_closed {
            SHUT_RECEIVE
        } else {
            0
        };
        self.sent_shutdown | send | receive
    }

    fn needs_update(&self) -> bool {
        self.update_asked || self.credit.needs_update()
    }

    /// Next packet for the guest. Data is read directly into `room`, which starts after the header.
    pub fn next_packet(
        &mut self,
        room: &GuestBuffers<'_>,
        timeouts: &VsockTimeouts,
    ) -> Option<OutgoingPacket> {
        let control = |op| {
            Some(OutgoingPacket {
                op,
                flags: 0,
                len: 0,
            })
        };
        match self.state {
            VsockConnectionState::Connecting { asked: false } => {
                self.state = VsockConnectionState::Connecting { asked: true };
                return control(VsockOp::Request);
            }
            VsockConnectionState::Accepting => {
                self.state = VsockConnectionState::Open;
                return control(VsockOp::Response);
            }
            VsockConnectionState::Open => {}
            _ => return None,
        }
        if let Some(len) = self.read(room) {
            return Some(OutgoingPacket {
                op: VsockOp::Rw,
                flags: 0,
                len,
            });
        }
        let shut = self.shutdown_to_send();
        if shut != self.sent_shutdown {
            self.sent_shutdown = shut;
            if shut == SHUT_BOTH {
                self.state = VsockConnectionState::Closing;
                self.deadline = Some(Instant::now() + timeouts.close);
            }
            return Some(OutgoingPacket {
                op: VsockOp::Shutdown,
                flags: shut,
                len: 0,
            });
        }
        if self.credit_request == CreditRequestState::Due {
            self.credit_request = CreditRequestState::Sent;
            return control(VsockOp::CreditRequest);
        }
        if self.needs_update() {
            return control(VsockOp::CreditUpdate);
        }
        None
    }

    fn read(&mut self, room: &GuestBuffers<'_>) -> Option<u32> {
        let credit = usize::try_from(self.credit.room()).unwrap_or(usize::MAX);
        let limit = credit.min(room.len()).min(MAX_PACKET_BYTES);
        if !self.can_read() || limit == 0 {
            return None;
        }
        let bytes = match receive_guest(self.stream.as_ref()?, room, limit) {
            Ok(bytes) => bytes,
            Err(Errno::EAGAIN) => {
                self.readable = false;
                return None;
            }
            // ECONNRESET: the host closed without reading everything. No more data follows.
            Err(_) => 0,
        };
        // After a full buffer the stream may hold more; a shorter read has emptied it.
        self.readable = bytes == limit || self.hung_up;
        if bytes == 0 {
            self.readable = false;
            self.host_send_closed = true;
            return None;
        }
        let bytes = u32::try_from(bytes).ok()?;
        self.credit.send(bytes);
        Some(bytes)
    }

    /// Notes that a packet with our credit is sent; returns its `fwd_cnt`.
    pub fn credit_sent(&mut self) -> u32 {
        self.update_asked = false;
        self.credit.announce()
    }

    /// Ends the guest's side. Returns true if the connection must stay until the backlog is sent.
    pub fn linger(&mut self) -> bool {
        self.state = VsockConnectionState::Lingering;
        self.deadline = None;
        if let Some(stream) = &self.stream {
            shutdown_stream(stream, Shutdown::Read);
        }
        self.stream.is_some() && !self.backlog.is_empty()
    }

    /// Updates the event loop and the deadline to the state; called when nothing can be sent for
    /// now.
    pub fn update_watch(
        &mut self,
        poller: &SlotPoller,
        token: u32,
        timeouts: &VsockTimeouts,
    ) -> Result<(), Errno> {
        let starved = self.can_read() && self.credit.room() == 0;
        if self.state == VsockConnectionState::Open
            && starved
            && self.credit_request == CreditRequestState::None
        {
            self.credit_request = CreditRequestState::Delayed;
            self.deadline = Some(Instant::now() + timeouts.credit);
        }
        let Some(stream) = &self.stream else {
            return Ok(());
        };
        let wanted_events = self.wanted_events();
        match (self.watched, wanted_events) {
            (None, None) => {}
            (None, Some(flags)) => poller.add(stream.as_fd(), token, flags)?,
            (Some(_), None) => poller.remove(stream.as_fd())?,
            (Some(old), Some(new)) if old != new => poller.modify(stream.as_fd(), token, new)?,
            _ => {}
        }
        self.watched = wanted_events;
        if self.state == VsockConnectionState::Closing {
            self.close(poller);
        }
        Ok(())
    }

    /// Events to watch the stream for; an empty set still reports a hangup of the host.
    fn wanted_events(&self) -> Option<EpollFlags> {
        if self.hung_up || self.state == VsockConnectionState::Closing {
            return None;
        }
        let mut flags = EpollFlags::empty();
        if !self.backlog.is_empty() {
            flags |= EpollFlags::EPOLLOUT;
        }
        let listening = self.guest_shut & SHUT_RECEIVE == 0 && !self.host_send_closed;
        if self.state == VsockConnectionState::Open && listening && !self.readable {
            flags |= EpollFlags::EPOLLIN;
        }
        Some(flags)
    }

    /// Removes the stream from the event loop and shuts it down, also for a host that holds a copy
    /// of it.
    pub fn close(&mut self, poller: &SlotPoller) {
        if let Some(stream) = self.stream.take() {
            if self.watched.take().is_some() {
                // The descriptor is open and watched, so this succeeds.
                let _ = poller.remove(stream.as_fd());
            }
            shutdown_stream(&stream, Shutdown::Both);
        }
    }
}
