//! Vsock device: serves the rings with the connections' multiplexer, interrupts, sets the timer.

use super::connect_limit::ConnectLimit;
use super::connection::MAX_PACKET_BYTES;
use super::header::{HEADER_BYTES, VsockHeader, VsockOp};
use super::muxer::Muxer;
use super::timer::{TIMER_TOKEN, VsockTimer};
use super::{GuestConnect, VsockConfig, VsockConnectError};
use crate::GuestMemory;
use crate::virtio::device::RingState;
use crate::virtio::device::chain::{DescriptorChain, GuestBuffers, check_queue, next_chain};
use crate::virtio::{Activation, DeviceError, Interrupt, VirtioDevice};
use nix::sys::epoll::EpollFlags;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_queue::{Queue, QueueOwnedT, QueueT};

/// Device id (virtio 1.2 section 5).
const DEVICE_ID: u32 = 19;
/// Sizes of the receive, transmit and event queues. A Linux guest fills the receive queue with
/// buffers of 4 KiB. 128 buffers hold more than the credit of one connection. Linux posts 8 event
/// buffers.
const QUEUE_SIZES: [u16; 3] = [128, 128, 8];
const TX_QUEUE: usize = 1;
/// Maximum number of packets per direction before control returns to the event loop.
const MAX_BATCH_PACKETS: usize = 512;
/// Maximum number of additional receive buffers that one read of a stream fills.
const MAX_GATHERED_BUFFERS: usize = 32;
/// Pieces of guest memory after which no buffer is added. The kernel accepts at most 1024 per call.
const MAX_GATHERED_PIECES: usize = 512;
/// Maximum number and age of packets from the guest whose buffers are returned without an
/// interrupt. The guest is notified with the next other interrupt, after this time, or at a quarter
/// of the ring. The guest needs these buffers only when the ring is full.
const MAX_UNREPORTED_PACKETS: u16 = 32;
const MAX_UNREPORTED_TIME: Duration = Duration::from_millis(1);
/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` (section 5.10.6.7), a le32.
const EVENT_TRANSPORT_RESET: [u8; 4] = [0; 4];

/// Virtio-vsock device.
pub struct Vsock {
    config: VsockConfig,
    listener: Box<dyn GuestConnect>,
    active: Option<ActiveVsock>,
    batch: Option<BatchedWork>,
}

/// Work deferred to the end of a batch of events: `any` work, and service of the transmit queue.
#[derive(Default)]
struct BatchedWork {
    any: bool,
    transmit: bool,
}

struct ActiveVsock {
    memory: GuestMemory,
    interrupt: Arc<dyn Interrupt>,
    rx: Queue,
    tx: Queue,
    event: Queue,
    timer: VsockTimer,
    muxer: Muxer,
    /// True while a transport reset waits for an event buffer.
    reset_due: bool,
    /// True if transmit packets remain because the batch was full, or may remain because the queue
    /// is paused.
    tx_pending: bool,
    /// Limit of the guest's connection requests. Above it, the transmit queue is paused for 10 ms.
    connects: ConnectLimit,
    unreported: UnreportedPackets,
}

/// Sent packets for whose buffers the guest was not interrupted yet.
#[derive(Default)]
struct UnreportedPackets {
    count: u16,
    /// Time by which the guest must be interrupted.
    until: Option<Instant>,
}

impl Vsock {
    /// Creates a device whose guest may connect to `config.host_ports`. `listener` receives the
    /// streams.
    pub fn new(config: VsockConfig, listener: Box<dyn GuestConnect>) -> Self {
        Self {
            config,
            listener,
            active: None,
            batch: None,
        }
    }

    /// Returns the number of connections, including those being established or closed.
    pub fn connections(&self) -> usize {
        self.active.as_ref().map_or(0, |a| a.muxer.len())
    }

    /// Joins `stream`, a connected Unix stream socket, to `port` in the guest. If the guest rejects
    /// the connection, does not reply within five seconds, or has no driver, the stream is closed
    /// without any data.
    pub fn connect(&mut self, port: u32, stream: OwnedFd) -> Result<(), VsockConnectError> {
        let active = self.active.as_mut().ok_or(VsockConnectError::NotActive)?;
        active.muxer.connect(port, stream)?;
        Ok(self.run(false)?)
    }

    /// Closes all connections without accessing guest memory. The guest must be stopped.
    pub fn disconnect(&mut self) {
        if let Some(active) = &mut self.active {
            active.muxer.clear();
        }
    }

    /// Drops every connection and sends the guest a transport reset event (section 5.10.6.7), as
    /// after a restore. The event is sent as soon as the guest provides an event buffer.
    pub fn transport_reset(&mut self) -> Result<(), DeviceError> {
        if let Some(active) = &mut self.active {
            active.muxer.clear();
            active.reset_due = true;
            active.connects = ConnectLimit::default();
        }
        self.run(false)
    }

    #[cfg(test)]
    pub(super) fn allow_all_connects(&mut self) {
        if let Some(active) = &mut self.active {
            active.connects = ConnectLimit::new(std::num::NonZeroU64::MAX);
        }
    }

    #[cfg(test)]
    pub(super) fn set_timeouts(&mut self, timeouts: super::connection::VsockTimeouts) {
        if let Some(active) = &mut self.active {
            active.muxer.timeouts = timeouts;
        }
    }

    /// Serves the rings and interrupts at most once, now or at the end of a batch. Packets of the
    /// guest are read if `transmit` is true. A device that fails releases all resources.
    fn run(&mut self, transmit: bool) -> Result<(), DeviceError> {
        // In a batch, only note the work. `end_batch` does it once.
        if let Some(batch) = &mut self.batch {
            batch.any = true;
            batch.transmit |= transmit;
            return Ok(());
        }
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let outcome = active.run(transmit, self.listener.as_mut());
        // Dropping the state closes all streams, so that the host notices the failure.
        if outcome.is_err() {
            self.active = None;
        }
        outcome
    }
}

impl VirtioDevice for Vsock {
    fn device_id(&self) -> u32 {
        DEVICE_ID
    }

    fn name(&self) -> &str {
        "vsock"
    }

    fn features(&self) -> u64 {
        // Without a negotiated socket type, only streams are supported (section 5.10.3).
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = u64::from(self.config.guest_cid).to_le_bytes();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let known = config.get(start..).unwrap_or_default();
        for (to, from) in data.iter_mut().zip(known) {
            *to = *from;
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.reset();
        self.active = Some(ActiveVsock::new(&self.config, activation)?);
        Ok(())
    }

    fn rings(&self) -> Vec<RingState> {
        let active = self.active.iter();
        active
            .flat_map(|a| [&a.rx, &a.tx, &a.event].map(RingState::of))
            .collect()
    }

    /// Drops the connections: they do not survive a restore.
    fn restored(&mut self) -> Result<(), DeviceError> {
        self.transport_reset()
    }

    fn reset(&mut self) {
        // The end of a batch does not reach an inactive device. Later events must not be deferred.
        (self.active, self.batch) = (None, None);
    }

    fn begin_batch(&mut self) {
        self.batch = Some(BatchedWork::default());
    }

    fn end_batch(&mut self) -> Result<(), DeviceError> {
        match self.batch.take() {
            Some(BatchedWork {
                any: true,
                transmit,
            }) => self.run(transmit),
            _ => Ok(()),
        }
    }

    fn queue_event(&mut self, index: usize) -> Result<(), DeviceError> {
        self.run(index == TX_QUEUE)
    }

    fn host_event(&mut self, token: u32, flags: EpollFlags) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let mut transmit = false;
        if token == TIMER_TOKEN {
            active.timer.clear()?;
            active.muxer.expire();
            transmit = active.tx_pending;
        } else {
            active.muxer.stream_event(token, flags);
        }
        self.run(transmit)
    }
}

fn ring(error: virtio_queue::Error) -> DeviceError {
    DeviceError::Guest(format!("ring: {error}"))
}

fn guest(what: &str) -> DeviceError {
    DeviceError::Guest(what.into())
}

/// Splits the space of a header off a receive buffer.
fn split_header<'m>(chain: &mut DescriptorChain<'m>) -> Result<GuestBuffers<'m>, DeviceError> {
    match chain.writable.take(HEADER_BYTES) {
        Some(front) if !chain.writable.is_empty() => Ok(front),
        _ => Err(guest("vsock receive buffer without room for data (5.10.6)")),
    }
}

/// Returns the receive buffer `head`, which contains data, to the guest.
fn finish_packet(
    rx: &mut Queue,
    memory: &GuestMemory,
    head: u16,
    front: &GuestBuffers<'_>,
    header: VsockHeader,
) -> Result<(), DeviceError> {
    front.copy_from(&header.to_bytes());
    let len = u32::try_from(HEADER_BYTES).map_or(header.len, |h| h + header.len);
    rx.add_used(memory, head, len).map_err(ring)
}

impl ActiveVsock {
    fn new(config: &VsockConfig, activation: Activation) -> Result<Self, DeviceError> {
        let Activation {
            memory,
            queues,
            interrupt,
            poller,
            ..
        } = activation;
        let Ok([mut rx, tx, event]) = <[Queue; 3]>::try_from(queues) else {
            return Err(guest("vsock has three queues"));
        };
        for queue in [&rx, &tx, &event] {
            if !queue.ready() {
                return Err(guest("a queue was not set up"));
            }
            check_queue(queue, &memory)?;
        }
        // Kicks for receive buffers are enabled only while a packet waits for a buffer.
        rx.disable_notification(&memory).map_err(ring)?;
        Ok(Self {
            memory,
            interrupt,
            rx,
            tx,
            event,
            timer: VsockTimer::new(poller.clone())?,
            muxer: Muxer::new(config.guest_cid, config.host_ports.clone(), poller),
            reset_due: false,
            tx_pending: false,
            connects: ConnectLimit::default(),
            unreported: UnreportedPackets::default(),
        })
    }

    /// Serves the queues: packets of the guest if `transmit` is set, then packets for the guest.
    /// Interrupts the guest at most once, and sets the timer if work remains.
    fn run(&mut self, transmit: bool, listener: &mut dyn GuestConnect) -> Result<(), DeviceError> {
        // While the queue is paused, only note that the timer must serve it later.
        match self.connects.paused_until() {
            None if transmit => self.unreported.count += self.drain_tx(listener)?,
            _ => self.tx_pending |= transmit,
        }
        let (used_rx, rx_pending) = self.fill_rx()?;
        let used_event = self.send_reset()?;
        let mut interrupt = false;
        for (queue, used) in [(&mut self.rx, used_rx), (&mut self.event, used_event)] {
            interrupt |= used && queue.needs_notification(&self.memory).map_err(ring)?;
        }
        interrupt |= self.report_sent(interrupt)?;
        if interrupt {
            self.interrupt.queue();
        }
        // If work remains, fire at once: other events are handled in between.
        let paused = self.connects.paused_until();
        let at = if rx_pending || (self.tx_pending && paused.is_none()) {
            Some(Instant::now())
        } else {
            let times = self
                .muxer
                .wake_at()
                .into_iter()
                .chain(self.unreported.until);
            times.chain(paused).min()
        };
        self.timer.fire_by(at)
    }

    /// Returns whether the guest must be interrupted for the buffers of sent packets: together with
    /// another interrupt if `interrupted`, or when it is due.
    fn report_sent(&mut self, interrupted: bool) -> Result<bool, DeviceError> {
        if self.unreported.count == 0 {
            return Ok(false);
        }
        let many = (self.tx.size() / 4).clamp(1, MAX_UNREPORTED_PACKETS);
        let due = || self.unreported.until.is_some_and(|at| at <= Instant::now());
        if interrupted || self.unreported.count >= many || due() {
            self.unreported = UnreportedPackets::default();
            return self.tx.needs_notification(&self.memory).map_err(ring);
        }
        if self.unreported.until.is_none() {
            self.unreported.until = Some(Instant::now() + MAX_UNREPORTED_TIME);
        }
        Ok(false)
    }

    /// Receives packets from the guest. Returns their number.
    fn drain_tx(&mut self, listener: &mut dyn GuestConnect) -> Result<u16, DeviceError> {
        let mut used = 0;
        self.tx_pending = false;
        // Iterations are counted instead of packets, so that a guest that continuously advances its
        // index gets no more time than others.
        for _ in 0..MAX_BATCH_PACKETS {
            let Some(mut chain) = next_chain(&mut self.tx, &self.memory)? else {
                if self.tx.enable_notification(&self.memory).map_err(ring)? {
                    continue;
                }
                return Ok(used);
            };
            let mut header = [0; HEADER_BYTES];
            let Some(front) = chain.readable.take(HEADER_BYTES) else {
                return Err(guest("vsock packet shorter than its header (5.10.6)"));
            };
            front.copy_to(&mut header);
            let header = VsockHeader::from_bytes(&header);
            // The header is a copy, which the guest cannot change after it was checked.
            self.muxer
                .receive(&header, &mut chain.readable, &mut *listener);
            self.tx
                .add_used(&self.memory, chain.head, 0)
                .map_err(ring)?;
            used += 1;
            let is_request = header.op == VsockOp::Request as u16;
            if is_request && self.connects.count(Instant::now()) {
                // Too many requests (`count` is true): pause the queue. The guest must not kick in
                // the meantime. At the end of the pause, the timer serves the queue again.
                self.tx.disable_notification(&self.memory).map_err(ring)?;
                break;
            }
        }
        self.tx_pending = true;
        Ok(used)
    }

    /// Sends packets to the guest. Returns whether packets were sent, and whether packets remain
    /// although buffers are available.
    fn fill_rx(&mut self) -> Result<(bool, bool), DeviceError> {
        let mut used = false;
        let mut packets = 0;
        while packets < MAX_BATCH_PACKETS {
            packets += 1;
            if !self.muxer.has_packet() {
                self.rx.disable_notification(&self.memory).map_err(ring)?;
                return Ok((used, false));
            }
            let Some(mut chain) = next_chain(&mut self.rx, &self.memory)? else {
                if self.rx.enable_notification(&self.memory).map_err(ring)? {
                    continue;
                }
                self.muxer.update_watch();
                return Ok((used, false));
            };
            let front = split_header(&mut chain)?;
            let Some((header, token)) = self.muxer.next_packet(&chain.writable) else {
                // No packet remains: undo `next_chain`, so that the next packet uses the buffer.
                self.rx.go_to_previous_position();
                continue;
            };
            let is_full = usize::try_from(header.len).is_ok_and(|len| len == chain.writable.len());
            finish_packet(&mut self.rx, &self.memory, chain.head, &front, header)?;
            used = true;
            // If other connections wait, they take turns, packet by packet.
            if let (true, Some(token)) = (is_full, token)
                && self.muxer.is_alone(token)
            {
                packets += self.read_more(header, token)?;
            }
        }
        self.muxer.update_watch();
        Ok((used, self.muxer.has_packet()))
    }

    /// Sends more data of a connection whose last packet, with `header`, filled its buffer: as much
    /// as one read of its stream returns. Returns the number of packets.
    fn read_more(&mut self, header: VsockHeader, token: u32) -> Result<usize, DeviceError> {
        // Take buffers before reading: one read can then fill several buffers.
        let (mut headers, mut data_buffers) = (Vec::new(), Vec::new());
        let (mut pieces, mut bytes) = (0, 0);
        while headers.len() < MAX_GATHERED_BUFFERS
            && pieces < MAX_GATHERED_PIECES
            && bytes < MAX_PACKET_BYTES
        {
            let Some(mut chain) = next_chain(&mut self.rx, &self.memory)? else {
                break;
            };
            let front = split_header(&mut chain)?;
            pieces += chain.writable.slices().len();
            bytes += chain.writable.len();
            headers.push((chain.head, front));
            data_buffers.push(chain.writable);
        }
        let mut left = if data_buffers.is_empty() {
            0
        } else {
            self.muxer.read_more(token, &data_buffers)
        };
        let mut packets = 0;
        for ((head, front), buffer) in headers.iter().zip(&data_buffers) {
            if left == 0 {
                break;
            }
            let now = left.min(buffer.len());
            left -= now;
            let len = u32::try_from(now).unwrap_or(u32::MAX);
            let header = VsockHeader { len, ..header };
            finish_packet(&mut self.rx, &self.memory, *head, front, header)?;
            packets += 1;
        }
        // Return unused buffers to the ring.
        for _ in packets..headers.len() {
            self.rx.go_to_previous_position();
        }
        Ok(packets)
    }

    /// Sends a due transport reset event. Returns whether it was sent.
    fn send_reset(&mut self) -> Result<bool, DeviceError> {
        if !self.reset_due {
            return Ok(false);
        }
        let mut chain = next_chain(&mut self.event, &self.memory)?;
        // The guest may have added a buffer before kicks were enabled.
        if chain.is_none() && self.event.enable_notification(&self.memory).map_err(ring)? {
            chain = next_chain(&mut self.event, &self.memory)?;
        }
        let Some(chain) = chain else {
            return Ok(false);
        };
        if chain.writable.copy_from(&EVENT_TRANSPORT_RESET) != EVENT_TRANSPORT_RESET.len() {
            return Err(guest("vsock event buffer too short (5.10.6.7)"));
        }
        self.event
            .add_used(&self.memory, chain.head, 4)
            .map_err(ring)?;
        self.reset_due = false;
        Ok(true)
    }
}
