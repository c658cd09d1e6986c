//! One connection: a pair of ports, a Unix stream, and how far each side has come.

use super::backlog::Backlog;
use super::credit::Credit;
use super::header::{Header, Op, SHUT_BOTH, SHUT_RECEIVE, SHUT_SEND};
use super::socket::{end, receive_guest, send_guest};
use crate::poll::SlotPoller;
use crate::virtio::device::chain::Buffers;
use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;
use nix::sys::socket::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Most data in one packet, as Linux has it (`VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`).
const MAX_DATA: usize = 64 * 1024;

/// The name of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ports {
    pub guest: u32,
    pub host: u32,
}

/// How long to wait for the guest.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For the answer to a connection request.
    pub connect: Duration,
    /// For the RST that confirms our SHUTDOWN (Linux waits as long: `VSOCK_CLOSE_TIMEOUT`).
    pub close: Duration,
    /// For room, before asking for it. Linux tells by itself, so that asking is rarely worth a packet.
    pub credit: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            close: Duration::from_secs(8),
            credit: Duration::from_millis(10),
        }
    }
}

/// What becomes of a connection after something happened to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// It goes on.
    Keep,
    /// The guest gets an RST and its ports are free again.
    Reset,
    /// The guest knows already; its ports are free again.
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The host wants to reach the guest; `asked`: the REQUEST has gone out.
    Connecting { asked: bool },
    /// The guest reached the host; the RESPONSE has yet to go out.
    Accepting,
    /// Bytes pass.
    Open,
    /// The host has gone and the guest was told; only its RST is missing.
    Closing,
    /// The guest has gone; only the backlog remains to be passed on.
    Lingering,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asking {
    No,
    /// The guest has no room; ask at the deadline.
    Later,
    Now,
    /// Asked; not again before there was room.
    Done,
}

/// A packet for the guest, without what the muxer knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    pub op: Op,
    pub flags: u32,
    pub len: u32,
}

#[derive(Debug)]
pub struct Connection {
    pub ports: Ports,
    pub credit: Credit,
    /// Whether the muxer has it in its queue of those with something to send.
    pub queued: bool,
    /// When to call [`Connection::expire`].
    pub deadline: Option<Instant>,
    state: State,
    /// None once nothing can pass any more in either direction.
    stream: Option<OwnedFd>,
    /// What the event loop watches the stream for; none: not at all.
    watched: Option<EpollFlags>,
    backlog: Backlog,
    /// The stream may have bytes or its end for us.
    readable: bool,
    /// The host sends no more, and everything it sent has gone to the guest.
    host_finished: bool,
    /// The host receives no more.
    host_deaf: bool,
    /// Both directions of the stream have ended; it must not be watched, it would never be quiet.
    hung_up: bool,
    /// `SHUT_*` from the guest.
    guest_shut: u32,
    /// `SHUT_*` to the guest.
    told_shut: u32,
    update_asked: bool,
    asking: Asking,
}

impl Connection {
    fn new(ports: Ports, stream: OwnedFd, state: State) -> Self {
        Self {
            ports,
            credit: Credit::default(),
            queued: false,
            deadline: None,
            state,
            stream: Some(stream),
            watched: None,
            backlog: Backlog::default(),
            readable: false,
            host_finished: false,
            host_deaf: false,
            hung_up: false,
            guest_shut: 0,
            told_shut: 0,
            update_asked: false,
            asking: Asking::No,
        }
    }

    /// The host asks for a connection; the guest must answer by `deadline`.
    pub fn connecting(ports: Ports, stream: OwnedFd, deadline: Instant) -> Self {
        let mut connection = Self::new(ports, stream, State::Connecting { asked: false });
        connection.deadline = Some(deadline);
        connection
    }

    /// The guest asked for a connection with `request`, and gets it.
    pub fn accepting(ports: Ports, stream: OwnedFd, request: &Header) -> Self {
        let mut connection = Self::new(ports, stream, State::Accepting);
        connection.credit.update(request);
        connection
    }

    /// A packet came from the guest; `data` is what followed the header.
    pub fn receive(&mut self, op: Op, header: &Header, data: &mut Buffers<'_>) -> Verdict {
        if op == Op::Rst {
            return Verdict::End;
        }
        self.credit.update(header);
        if self.credit.room() > 0 && self.asking != Asking::No {
            self.asking = Asking::No;
            if self.state == State::Open {
                self.deadline = None;
            }
        }
        match (self.state, op) {
            (State::Connecting { asked: true }, Op::Response) => {
                self.state = State::Open;
                self.deadline = None;
                // The host has most likely written already; trying saves a turn of the event loop.
                self.readable = true;
                Verdict::Keep
            }
            (State::Connecting { .. } | State::Lingering, _) => Verdict::Reset,
            (_, Op::Request | Op::Response) => Verdict::Reset,
            (_, Op::Rw) => self.receive_data(header.len, data),
            (_, Op::Shutdown) => self.receive_shutdown(header.flags),
            (_, Op::CreditRequest) => {
                self.update_asked = true;
                Verdict::Keep
            }
            (_, Op::CreditUpdate | Op::Rst) => Verdict::Keep,
        }
    }

    fn receive_data(&mut self, len: u32, data: &mut Buffers<'_>) -> Verdict {
        let data = usize::try_from(len).ok().and_then(|len| data.take(len));
        let Some(mut data) = data else {
            return Verdict::Reset;
        };
        if self.guest_shut & SHUT_SEND != 0 || !self.credit.receive(len) {
            return Verdict::Reset;
        }
        let stream = match &self.stream {
            Some(stream) if !self.host_deaf => stream,
            _ => {
                self.credit.forward(len);
                return Verdict::Keep;
            }
        };
        let mut sent = 0;
        if self.backlog.is_empty() && len > 0 {
            sent = match send_guest(stream, &data) {
                Ok(sent) => sent,
                Err(Errno::EAGAIN) => 0,
                Err(_) => {
                    self.credit.forward(len);
                    self.host_deaf = true;
                    return Verdict::Keep;
                }
            };
        }
        self.credit.forward(u32::try_from(sent).unwrap_or(len));
        if data.take(sent).is_some() && !data.is_empty() {
            self.backlog.push(&data);
        }
        Verdict::Keep
    }

    fn receive_shutdown(&mut self, flags: u32) -> Verdict {
        self.guest_shut |= flags & SHUT_BOTH;
        if self.guest_shut == SHUT_BOTH {
            return Verdict::Reset;
        }
        if let Some(stream) = &self.stream {
            if self.guest_shut & SHUT_RECEIVE != 0 {
                self.readable = false;
                end(stream, Shutdown::Read);
            }
            if self.guest_shut & SHUT_SEND != 0 && self.backlog.is_empty() {
                end(stream, Shutdown::Write);
            }
        }
        Verdict::Keep
    }

    /// The event loop saw something on the stream.
    pub fn stream_event(&mut self, flags: EpollFlags) -> Verdict {
        self.hung_up |= flags.intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR);
        if flags.contains(EpollFlags::EPOLLOUT) || self.hung_up {
            self.flush();
        }
        if self.hung_up {
            self.lose_host();
        }
        if flags.contains(EpollFlags::EPOLLIN) || self.hung_up {
            if self.guest_shut & SHUT_RECEIVE != 0 {
                self.host_finished |= self.hung_up;
            } else {
                self.readable = !self.host_finished;
            }
        }
        if self.state == State::Lingering && self.backlog.is_empty() {
            return Verdict::End;
        }
        Verdict::Keep
    }

    fn flush(&mut self) {
        let (Some(stream), false) = (&self.stream, self.backlog.is_empty()) else {
            return;
        };
        match self.backlog.flush(stream) {
            Ok(bytes) => self.credit.forward(bytes),
            Err(_) => return self.lose_host(),
        }
        if self.backlog.is_empty() && self.guest_shut & SHUT_SEND != 0 {
            end(stream, Shutdown::Write);
        }
    }

    /// The host takes nothing any more.
    fn lose_host(&mut self) {
        self.host_deaf = true;
        self.credit.forward(self.backlog.clear());
    }

    /// The deadline has passed.
    pub fn expire(&mut self) -> Verdict {
        self.deadline = None;
        match self.state {
            State::Connecting { asked: false } => Verdict::End,
            State::Connecting { asked: true } | State::Closing => Verdict::Reset,
            State::Open if self.asking == Asking::Later => {
                self.asking = Asking::Now;
                Verdict::Keep
            }
            _ => Verdict::Keep,
        }
    }

    /// Whether [`Connection::next_packet`] would have something, as far as one can tell without trying.
    pub fn has_packet(&self) -> bool {
        match self.state {
            State::Connecting { asked } => !asked,
            State::Accepting => true,
            State::Open => {
                (self.can_read() && self.credit.room() > 0)
                    || self.shut_to_tell() != self.told_shut
                    || self.asking == Asking::Now
                    || self.owes_update()
            }
            State::Closing | State::Lingering => false,
        }
    }

    fn can_read(&self) -> bool {
        self.readable && !self.host_finished && self.guest_shut & SHUT_RECEIVE == 0
    }

    fn shut_to_tell(&self) -> u32 {
        let send = if self.host_finished { SHUT_SEND } else { 0 };
        let receive = if self.host_deaf { SHUT_RECEIVE } else { 0 };
        self.told_shut | send | receive
    }

    fn owes_update(&self) -> bool {
        self.update_asked || self.credit.owes_update()
    }

    /// The next packet for the guest. Data goes straight into `room`, which starts behind the header.
    pub fn next_packet(&mut self, room: &Buffers<'_>, patience: &Patience) -> Option<Packet> {
        let control = |op| {
            Some(Packet {
                op,
                flags: 0,
                len: 0,
            })
        };
        match self.state {
            State::Connecting { asked: false } => {
                self.state = State::Connecting { asked: true };
                return control(Op::Request);
            }
            State::Accepting => {
                self.state = State::Open;
                return control(Op::Response);
            }
            State::Open => {}
            _ => return None,
        }
        if let Some(len) = self.read(room) {
            return Some(Packet {
                op: Op::Rw,
                flags: 0,
                len,
            });
        }
        let shut = self.shut_to_tell();
        if shut != self.told_shut {
            self.told_shut = shut;
            if shut == SHUT_BOTH {
                self.state = State::Closing;
                self.deadline = Some(Instant::now() + patience.close);
            }
            return Some(Packet {
                op: Op::Shutdown,
                flags: shut,
                len: 0,
            });
        }
        if self.asking == Asking::Now {
            self.asking = Asking::Done;
            return control(Op::CreditRequest);
        }
        if self.owes_update() {
            return control(Op::CreditUpdate);
        }
        None
    }

    fn read(&mut self, room: &Buffers<'_>) -> Option<u32> {
        let credit = usize::try_from(self.credit.room()).unwrap_or(usize::MAX);
        let limit = credit.min(room.len()).min(MAX_DATA);
        if !self.can_read() || limit == 0 {
            return None;
        }
        let bytes = match receive_guest(self.stream.as_ref()?, room, limit) {
            Ok(bytes) => bytes,
            Err(Errno::EAGAIN) => {
                self.readable = false;
                return None;
            }
            // ECONNRESET: the host closed without reading everything. Nothing more will come.
            Err(_) => 0,
        };
        // A full buffer may have left something behind; anything less has emptied the stream.
        self.readable = bytes == limit || self.hung_up;
        if bytes == 0 {
            self.readable = false;
            self.host_finished = true;
            return None;
        }
        let bytes = u32::try_from(bytes).ok()?;
        self.credit.send(bytes);
        Some(bytes)
    }

    /// A packet went out with our credit in it.
    pub fn told_credit(&mut self) -> u32 {
        self.update_asked = false;
        self.credit.tell()
    }

    /// The guest's side has ended. Whether the connection must stay to pass the backlog on.
    pub fn linger(&mut self) -> bool {
        self.state = State::Lingering;
        self.deadline = None;
        if let Some(stream) = &self.stream {
            end(stream, Shutdown::Read);
        }
        self.stream.is_some() && !self.backlog.is_empty()
    }

    /// Brings the event loop and the deadline in line with the state; to be called when nothing can be sent for now.
    pub fn park(
        &mut self,
        poller: &SlotPoller,
        token: u32,
        patience: &Patience,
    ) -> Result<(), Errno> {
        let starved = self.can_read() && self.credit.room() == 0;
        if self.state == State::Open && starved && self.asking == Asking::No {
            self.asking = Asking::Later;
            self.deadline = Some(Instant::now() + patience.credit);
        }
        let Some(stream) = &self.stream else {
            return Ok(());
        };
        let wanted = self.wanted();
        match (self.watched, wanted) {
            (None, None) => {}
            (None, Some(flags)) => poller.add(stream.as_fd(), token, flags)?,
            (Some(_), None) => poller.remove(stream.as_fd())?,
            (Some(old), Some(new)) if old != new => poller.modify(stream.as_fd(), token, new)?,
            _ => {}
        }
        self.watched = wanted;
        if self.state == State::Closing {
            self.close(poller);
        }
        Ok(())
    }

    /// What to watch the stream for; nothing at all still tells when the host has gone.
    fn wanted(&self) -> Option<EpollFlags> {
        if self.hung_up || self.state == State::Closing {
            return None;
        }
        let mut flags = EpollFlags::empty();
        if !self.backlog.is_empty() {
            flags |= EpollFlags::EPOLLOUT;
        }
        let listening = self.guest_shut & SHUT_RECEIVE == 0 && !self.host_finished;
        if self.state == State::Open && listening && !self.readable {
            flags |= EpollFlags::EPOLLIN;
        }
        Some(flags)
    }

    /// Takes the stream out of the event loop and closes it, also for a host that holds a copy of it.
    pub fn close(&mut self, poller: &SlotPoller) {
        if let Some(stream) = self.stream.take() {
            if self.watched.take().is_some() {
                // The descriptor is open and watched, so this succeeds.
                let _ = poller.remove(stream.as_fd());
            }
            end(&stream, Shutdown::Both);
        }
    }
}
