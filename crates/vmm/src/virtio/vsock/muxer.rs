//! Multiplexer of a guest's connections. It finds the connection to which a packet belongs, and the
//! connection that sends the next packet.

use super::connection::{
    ConnectionAction, OutgoingPacket, PortPair, VsockConnection, VsockTimeouts,
};
use super::credit::BUF_ALLOC_BYTES;
use super::header::{HOST_CID, TYPE_STREAM, VsockHeader, VsockOp};
use super::{GuestConnect, MAX_CONNECTIONS, VsockConnectError};
use crate::poll::SlotPoller;
use crate::virtio::device::chain::GuestBuffers;
use nix::sys::epoll::EpollFlags;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Maximum number of RSTs that wait for a receive buffer, more than a well-behaved guest with the
/// maximum number of connections causes.
const MAX_RESETS: usize = 2 * MAX_CONNECTIONS;
/// Smallest host port of connections into the guest. Bit 30 is set in each of these ports. They
/// exclude the ports in `host_ports`.
const FIRST_EPHEMERAL: u32 = 1 << 30;
/// Smallest token of a connection. The device uses lower tokens.
pub const FIRST_TOKEN: u32 = 16;

/// RST packet that is not sent yet.
#[derive(Debug)]
struct PendingReset {
    ports: PortPair,
    kind: u16,
}

/// All connections of the device.
#[derive(Debug)]
pub struct Muxer {
    guest_cid: u64,
    /// Host ports to which the guest may connect.
    host_ports: Vec<u32>,
    poller: SlotPoller,
    /// Connections by token. A token also identifies the stream in the event loop.
    connections: HashMap<u32, VsockConnection>,
    /// Tokens of connections by their ports. Lingering connections are not included: they are
    /// closed for the guest, which may reuse their ports.
    tokens: HashMap<PortPair, u32>,
    /// Connections with packets to send, once each, in round-robin order.
    ready: VecDeque<u32>,
    resets: VecDeque<PendingReset>,
    /// Last assigned token. The search for a free token starts after it.
    last_token: u32,
    /// Last assigned host port. The search for a free port starts after it.
    last_port: u32,
    /// Earliest deadline of a connection. The value may be earlier if that deadline was changed or
    /// removed.
    wake_at: Option<Instant>,
    pub timeouts: VsockTimeouts,
}

impl Muxer {
    pub fn new(guest_cid: u32, host_ports: Vec<u32>, poller: SlotPoller) -> Self {
        Self {
            guest_cid: u64::from(guest_cid),
            host_ports,
            poller,
            connections: HashMap::new(),
            tokens: HashMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            last_token: FIRST_TOKEN - 1,
            // The first port is random: after a restore, the guest may still have sockets from
            // before the snapshot, whose ports should not be reused.
            last_port: u32::try_from(RandomState::new().hash_one(0) >> 32).unwrap_or(0),
            wake_at: None,
            timeouts: VsockTimeouts::default(),
        }
    }

    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Returns the time of the next call of [`Muxer::expire`].
    pub fn wake_at(&self) -> Option<Instant> {
        self.wake_at
    }

    /// Connects the host's `stream` to `port` in the guest.
    pub fn connect(&mut self, port: u32, stream: OwnedFd) -> Result<(), VsockConnectError> {
        if self.connections.len() >= MAX_CONNECTIONS {
            return Err(VsockConnectError::TooMany);
        }
        let ports = self.free_ports(port);
        let deadline = Instant::now() + self.timeouts.connect;
        let mut connection = VsockConnection::connecting(ports, stream, deadline);
        let token = self.free_token();
        connection
            .update_watch(&self.poller, token, &self.timeouts)
            .map_err(VsockConnectError::Stream)?;
        self.insert(token, connection);
        Ok(())
    }

    /// Handles a packet from the guest. `data` follows the header.
    pub fn receive(
        &mut self,
        header: &VsockHeader,
        data: &mut GuestBuffers<'_>,
        listener: &mut dyn GuestConnect,
    ) {
        // A guest can only send on its own behalf, and only to the host. Other packets are dropped
        // without a reply.
        if header.src_cid != self.guest_cid || header.dst_cid != HOST_CID {
            return;
        }
        let ports = PortPair {
            guest: header.src_port,
            host: header.dst_port,
        };
        let op = VsockOp::from_number(header.op);
        if header.kind != TYPE_STREAM {
            // Replying to an RST with an RST would cause an endless exchange.
            if op != Some(VsockOp::Rst) {
                self.reset(ports, header.kind);
            }
            return;
        }
        let token = self.tokens.get(&ports).copied();
        let connection = token.and_then(|token| self.connections.get_mut(&token));
        match (token.zip(connection), op) {
            (Some((token, connection)), Some(op)) => {
                let action = connection.receive(op, header, data);
                self.apply(token, action);
            }
            (None, Some(VsockOp::Request)) => self.accept(ports, header, listener),
            (None, Some(VsockOp::Rst)) | (Some(_), None) => {}
            (None, _) => self.reset(ports, TYPE_STREAM),
        }
    }

    /// Handles a request of the guest for a connection to a port of the host.
    fn accept(&mut self, ports: PortPair, request: &VsockHeader, listener: &mut dyn GuestConnect) {
        // Only the ports of the configuration are allowed, so a guest cannot reach other services.
        if self.connections.len() >= MAX_CONNECTIONS || !self.host_ports.contains(&ports.host) {
            return self.reset(ports, TYPE_STREAM);
        }
        let Ok((ours, theirs)) = UnixStream::pair() else {
            return self.reset(ports, TYPE_STREAM);
        };
        if listener.guest_connect(ports.host, theirs).is_err() {
            return self.reset(ports, TYPE_STREAM);
        }
        let token = self.free_token();
        let connection = VsockConnection::accepting(ports, ours.into(), request);
        self.insert(token, connection);
    }

    /// Handles events of a stream.
    pub fn stream_event(&mut self, token: u32, flags: EpollFlags) {
        // The connection may have ended while this event was pending.
        if let Some(connection) = self.connections.get_mut(&token) {
            let action = connection.stream_event(flags);
            self.apply(token, action);
        }
    }

    /// Handles all expired deadlines.
    pub fn expire(&mut self) {
        let now = Instant::now();
        // The end of this function computes the time again from the remaining deadlines.
        self.wake_at = None;
        let due = |c: &VsockConnection| c.deadline.is_some_and(|d| d <= now);
        let expired: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, c)| due(c))
            .map(|(token, _)| *token)
            .collect();
        for token in expired {
            if let Some(connection) = self.connections.get_mut(&token) {
                let action = connection.expire();
                self.apply(token, action);
            }
        }
        self.wake_at = self.connections.values().filter_map(|c| c.deadline).min();
    }

    /// Returns whether there may be a packet for the guest.
    pub fn has_packet(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// Returns the next packet for the guest, and the token of its connection (`None` for an RST).
    /// The data is already in `buffer`, which starts after the header. RSTs are sent first, so that
    /// they do not close a later connection with the same ports. Connections follow in round-robin
    /// order.
    pub fn next_packet(&mut self, buffer: &GuestBuffers<'_>) -> Option<(VsockHeader, Option<u32>)> {
        if let Some(PendingReset { ports, kind }) = self.resets.pop_front() {
            let header = VsockHeader {
                kind,
                op: VsockOp::Rst as u16,
                ..self.address(ports)
            };
            return Some((header, None));
        }
        while let Some(token) = self.ready.pop_front() {
            // The connection may have ended while it was queued.
            let Some(connection) = self.connections.get_mut(&token) else {
                continue;
            };
            connection.queued = false;
            let ports = connection.ports;
            let packet = connection.next_packet(buffer, &self.timeouts);
            let fwd_cnt = if packet.is_some() {
                connection.credit_sent()
            } else {
                0
            };
            // Queue the connection again at the end if it has more packets.
            self.apply(token, ConnectionAction::Keep);
            if let Some(OutgoingPacket { op, flags, len }) = packet {
                let header = VsockHeader {
                    len,
                    kind: TYPE_STREAM,
                    op: op as u16,
                    flags,
                    buf_alloc: BUF_ALLOC_BYTES,
                    fwd_cnt,
                    ..self.address(ports)
                };
                return Some((header, Some(token)));
            }
        }
        None
    }

    /// Returns whether neither an RST nor another connection's packet waits to be sent.
    pub fn is_alone(&self, token: u32) -> bool {
        self.resets.is_empty() && self.ready.iter().all(|ready| *ready == token)
    }

    /// Reads more data of a connection into `buffers`, in one call to the host. Returns the number
    /// of bytes. The connection retains its position in the order.
    pub fn read_more(&mut self, token: u32, buffers: &[GuestBuffers<'_>]) -> usize {
        let connection = self.connections.get_mut(&token);
        let read = connection.and_then(|connection| connection.read(buffers));
        read.and_then(|bytes| usize::try_from(bytes).ok())
            .unwrap_or(0)
    }

    /// Updates the events for which the streams of ready connections are watched, because no more
    /// packets can be sent now. Data that waits in a stream then causes no further events.
    pub fn update_watch(&mut self) {
        // Clone the list: `update_watch_of` borrows all of `self`.
        for token in self.ready.clone() {
            self.update_watch_of(token);
        }
    }

    /// Drops every connection and all pending packets.
    pub fn clear(&mut self) {
        for connection in self.connections.values_mut() {
            connection.close(&self.poller);
        }
        self.connections.clear();
        self.tokens.clear();
        self.ready.clear();
        self.resets.clear();
        self.wake_at = None;
    }

    /// Returns a header with the addresses of a packet to the guest. The other fields are 0.
    fn address(&self, ports: PortPair) -> VsockHeader {
        VsockHeader {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: ports.host,
            dst_port: ports.guest,
            ..VsockHeader::default()
        }
    }

    /// Queues an RST for the guest. `kind` is its socket type.
    fn reset(&mut self, ports: PortPair, kind: u16) {
        if self.resets.len() < MAX_RESETS {
            self.resets.push_back(PendingReset { ports, kind });
        }
    }

    /// Adds a connection.
    fn insert(&mut self, token: u32, connection: VsockConnection) {
        self.tokens.insert(connection.ports, token);
        self.connections.insert(token, connection);
        self.apply(token, ConnectionAction::Keep);
    }

    /// Performs the action that an event of a connection requires.
    fn apply(&mut self, token: u32, action: ConnectionAction) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        if action == ConnectionAction::Keep {
            if !connection.has_packet() {
                return self.update_watch_of(token);
            }
            if !connection.queued {
                connection.queued = true;
                self.ready.push_back(token);
            }
            return self.schedule_wake(token);
        }
        let ports = connection.ports;
        let lingers = connection.linger();
        // If this connection was lingering (closed for the guest), its ports may already belong to
        // a later connection.
        if self.tokens.get(&ports) == Some(&token) {
            self.tokens.remove(&ports);
            if action == ConnectionAction::SendReset {
                self.reset(ports, TYPE_STREAM);
            }
        }
        if lingers {
            self.update_watch_of(token);
        } else {
            self.remove(token);
        }
    }

    /// Watches the stream of a connection for the events that it needs now.
    fn update_watch_of(&mut self, token: u32) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        match connection.update_watch(&self.poller, token, &self.timeouts) {
            Ok(()) => self.schedule_wake(token),
            // A stream that the event loop cannot watch must be closed: its events would be lost.
            Err(_) => {
                let ports = connection.ports;
                if self.tokens.get(&ports) == Some(&token) {
                    self.tokens.remove(&ports);
                    self.reset(ports, TYPE_STREAM);
                }
                self.remove(token);
            }
        }
    }

    fn remove(&mut self, token: u32) {
        if let Some(mut connection) = self.connections.remove(&token) {
            connection.close(&self.poller);
        }
    }

    /// Adds the deadline of a connection to the earliest deadline.
    fn schedule_wake(&mut self, token: u32) {
        let deadline = self.connections.get(&token).and_then(|c| c.deadline);
        self.wake_at = self.wake_at.into_iter().chain(deadline).min();
    }

    /// Returns a token for a new connection.
    fn free_token(&mut self) -> u32 {
        // The loop ends: there are far fewer connections than tokens.
        loop {
            self.last_token = self.last_token.checked_add(1).unwrap_or(FIRST_TOKEN);
            if !self.connections.contains_key(&self.last_token) {
                return self.last_token;
            }
        }
    }

    /// Returns the ports of a new connection from the host to the port `guest`.
    fn free_ports(&mut self, guest: u32) -> PortPair {
        // The loop ends: there are far fewer connections than ports.
        loop {
            let host = FIRST_EPHEMERAL | self.last_port.wrapping_add(1);
            self.last_port = host;
            let ports = PortPair { guest, host };
            // `VMADDR_PORT_ANY` is reserved.
            let any = host == u32::MAX;
            if !any && !self.tokens.contains_key(&ports) && !self.host_ports.contains(&host) {
                return ports;
            }
        }
    }
}

impl Drop for Muxer {
    fn drop(&mut self) {
        self.clear();
    }
}
