//! All connections of a guest: finds the one a packet is for, and says which one may send next.

use super::connection::{Connection, Packet, Patience, Ports, Verdict};
use super::credit::BUF_ALLOC;
use super::header::{HOST_CID, Header, Op, STREAM};
use super::{ConnectError, GuestConnect, MAX_CONNECTIONS};
use crate::poll::SlotPoller;
use crate::virtio::device::chain::Buffers;
use nix::sys::epoll::EpollFlags;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Most RSTs that wait for a receive buffer. More than an honest guest with all its connections causes.
const MAX_RESETS: usize = 2 * MAX_CONNECTIONS;
/// Host ports of connections into the guest; below are those a guest may ask for.
const FIRST_EPHEMERAL: u32 = 1 << 30;
/// Smallest token of a connection; the device has those below.
pub const FIRST_TOKEN: u32 = 16;

#[derive(Debug)]
struct Reset {
    ports: Ports,
    kind: u16,
}

#[derive(Debug)]
pub struct Muxer {
    guest_cid: u64,
    host_ports: Vec<u32>,
    poller: SlotPoller,
    connections: HashMap<u32, Connection>,
    /// Those of which the guest knows. What lingers is not here.
    tokens: HashMap<Ports, u32>,
    /// Connections with something to send, each once, in turn.
    ready: VecDeque<u32>,
    resets: VecDeque<Reset>,
    last_token: u32,
    last_port: u32,
    wake_at: Option<Instant>,
    pub patience: Patience,
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
            // A clone of this guest may still hold sockets of an earlier life: do not start where that one did.
            last_port: u32::try_from(RandomState::new().hash_one(0) >> 32).unwrap_or(0),
            wake_at: None,
            patience: Patience::default(),
        }
    }

    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// When [`Muxer::expire`] has something to do.
    pub fn wake_at(&self) -> Option<Instant> {
        self.wake_at
    }

    /// The host wants to reach `port` in the guest.
    pub fn connect(&mut self, port: u32, stream: OwnedFd) -> Result<(), ConnectError> {
        if self.connections.len() >= MAX_CONNECTIONS {
            return Err(ConnectError::TooMany);
        }
        let ports = self.free_ports(port);
        let deadline = Instant::now() + self.patience.connect;
        let mut connection = Connection::connecting(ports, stream, deadline);
        let token = self.free_token();
        connection
            .park(&self.poller, token, &self.patience)
            .map_err(ConnectError::Stream)?;
        self.insert(token, connection);
        Ok(())
    }

    /// A packet came from the guest; `data` is what followed the header.
    pub fn receive(
        &mut self,
        header: &Header,
        data: &mut Buffers<'_>,
        listener: &mut dyn GuestConnect,
    ) {
        if header.src_cid != self.guest_cid || header.dst_cid != HOST_CID {
            return;
        }
        let ports = Ports {
            guest: header.src_port,
            host: header.dst_port,
        };
        let op = Op::from_number(header.op);
        if header.kind != STREAM {
            if op != Some(Op::Rst) {
                self.reset(ports, header.kind);
            }
            return;
        }
        let token = self.tokens.get(&ports).copied();
        let connection = token.and_then(|token| self.connections.get_mut(&token));
        match (token.zip(connection), op) {
            (Some((token, connection)), Some(op)) => {
                let verdict = connection.receive(op, header, data);
                self.settle(token, verdict);
            }
            (None, Some(Op::Request)) => self.accept(ports, header, listener),
            (None, Some(Op::Rst)) | (Some(_), None) => {}
            (None, _) => self.reset(ports, STREAM),
        }
    }

    fn accept(&mut self, ports: Ports, request: &Header, listener: &mut dyn GuestConnect) {
        if self.connections.len() >= MAX_CONNECTIONS || !self.host_ports.contains(&ports.host) {
            return self.reset(ports, STREAM);
        }
        let Ok((ours, theirs)) = UnixStream::pair() else {
            return self.reset(ports, STREAM);
        };
        if listener.guest_connect(ports.host, theirs).is_err() {
            return self.reset(ports, STREAM);
        }
        let token = self.free_token();
        let connection = Connection::accepting(ports, ours.into(), request);
        self.insert(token, connection);
    }

    /// The event loop saw something on a stream.
    pub fn stream_event(&mut self, token: u32, flags: EpollFlags) {
        // A connection that ended while this event was under way is not there any more.
        if let Some(connection) = self.connections.get_mut(&token) {
            let verdict = connection.stream_event(flags);
            self.settle(token, verdict);
        }
    }

    /// Deals with all deadlines that have passed.
    pub fn expire(&mut self) {
        let now = Instant::now();
        self.wake_at = None;
        let due = |c: &Connection| c.deadline.is_some_and(|d| d <= now);
        let expired: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, c)| due(c))
            .map(|(token, _)| *token)
            .collect();
        for token in expired {
            if let Some(connection) = self.connections.get_mut(&token) {
                let verdict = connection.expire();
                self.settle(token, verdict);
            }
        }
        self.wake_at = self.connections.values().filter_map(|c| c.deadline).min();
    }

    /// Whether there may be a packet for the guest.
    pub fn has_packet(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// The next packet for the guest, its data already in `room`, which starts behind the header. RSTs first, so
    /// that none ends a later connection of the same ports; then every connection in turn.
    pub fn next_packet(&mut self, room: &Buffers<'_>) -> Option<Header> {
        if let Some(Reset { ports, kind }) = self.resets.pop_front() {
            return Some(Header {
                kind,
                op: Op::Rst as u16,
                ..self.address(ports)
            });
        }
        while let Some(token) = self.ready.pop_front() {
            let Some(connection) = self.connections.get_mut(&token) else {
                continue;
            };
            connection.queued = false;
            let ports = connection.ports;
            let packet = connection.next_packet(room, &self.patience);
            let fwd_cnt = if packet.is_some() {
                connection.told_credit()
            } else {
                0
            };
            self.settle(token, Verdict::Keep);
            if let Some(Packet { op, flags, len }) = packet {
                return Some(Header {
                    len,
                    kind: STREAM,
                    op: op as u16,
                    flags,
                    buf_alloc: BUF_ALLOC,
                    fwd_cnt,
                    ..self.address(ports)
                });
            }
        }
        None
    }

    /// The guest has no buffer for those still in turn: stop watching their streams for more.
    pub fn park(&mut self) {
        for token in self.ready.clone() {
            self.park_one(token);
        }
    }

    /// Drops every connection and all that was to be said.
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

    fn address(&self, ports: Ports) -> Header {
        Header {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: ports.host,
            dst_port: ports.guest,
            ..Header::default()
        }
    }

    fn reset(&mut self, ports: Ports, kind: u16) {
        if self.resets.len() < MAX_RESETS {
            self.resets.push_back(Reset { ports, kind });
        }
    }

    fn insert(&mut self, token: u32, connection: Connection) {
        self.tokens.insert(connection.ports, token);
        self.connections.insert(token, connection);
        self.settle(token, Verdict::Keep);
    }

    /// Draws the consequences of whatever just happened to a connection.
    fn settle(&mut self, token: u32, verdict: Verdict) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        if verdict == Verdict::Keep {
            if !connection.has_packet() {
                return self.park_one(token);
            }
            if !connection.queued {
                connection.queued = true;
                self.ready.push_back(token);
            }
            return self.note_deadline(token);
        }
        let ports = connection.ports;
        let stays = connection.linger();
        if self.tokens.get(&ports) == Some(&token) {
            self.tokens.remove(&ports);
            if verdict == Verdict::Reset {
                self.reset(ports, STREAM);
            }
        }
        if stays {
            self.park_one(token);
        } else {
            self.remove(token);
        }
    }

    fn park_one(&mut self, token: u32) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        match connection.park(&self.poller, token, &self.patience) {
            Ok(()) => self.note_deadline(token),
            // The event loop cannot watch the stream: nobody would ever notice what happens on it.
            Err(_) => {
                let ports = connection.ports;
                if self.tokens.get(&ports) == Some(&token) {
                    self.tokens.remove(&ports);
                    self.reset(ports, STREAM);
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

    fn note_deadline(&mut self, token: u32) {
        let deadline = self.connections.get(&token).and_then(|c| c.deadline);
        self.wake_at = self.wake_at.into_iter().chain(deadline).min();
    }

    fn free_token(&mut self) -> u32 {
        loop {
            self.last_token = self.last_token.checked_add(1).unwrap_or(FIRST_TOKEN);
            if !self.connections.contains_key(&self.last_token) {
                return self.last_token;
            }
        }
    }

    fn free_ports(&mut self, guest: u32) -> Ports {
        loop {
            let host = FIRST_EPHEMERAL | self.last_port.wrapping_add(1);
            self.last_port = host;
            let ports = Ports { guest, host };
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
