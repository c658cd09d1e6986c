//! Guest with a minimal vsock driver. It reads a used ring only after an interrupt, and kicks only
//! when the device requests it, so that tests detect lost notifications.

use super::super::connection::VsockTimeouts;
use super::super::header::{HEADER_BYTES, HOST_CID, TYPE_STREAM, VsockHeader, VsockOp};
use super::super::{Vsock, VsockConfig, VsockConnectError};
use crate::virtio::testing::{Buffer, DeviceHarness, Ring, memory, readable, writable};
use crate::virtio::{DeviceError, VirtioDevice};
use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};

pub const GUEST_CID: u32 = 3;
/// Size of a receive buffer of a Linux guest in bytes: 4 KiB without the kernel's overhead.
pub const RX_BUFFER_BYTES: u32 = 3776;
/// Numbers of the queues and rings.
pub const RX_QUEUE: usize = 0;
pub const TX_QUEUE: usize = 1;
pub const EVENT_QUEUE: usize = 2;
/// Sizes of the rings: receive, transmit and event queue.
const QUEUE_SIZES: [u16; 3] = [128, 128, 8];
const RING_ADDRESSES: [u64; 3] = [0x1_0000, 0x2_0000, 0x3_0000];
/// Address of the receive buffers in guest memory. [`TX_AREA`] is the address of sent packets.
pub const RX_AREA: u64 = 0x10_0000;
pub const TX_AREA: u64 = 0x20_0000;
pub const MEMORY_BYTES: usize = 0x100_0000;

pub struct VsockGuest {
    pub device: Vsock,
    pub harness: DeviceHarness,
    pub rings: [Ring; 3],
    /// Connections that the guest opened: host port and stream.
    pub host: Receiver<(u32, UnixStream)>,
    /// Packets from the device that no test has read yet.
    pub received: VecDeque<(VsockHeader, Vec<u8>)>,
    /// Number of events received on the event queue.
    pub events: usize,
    /// True if each used receive buffer is replaced by a new one.
    pub refill: bool,
    event_idx: bool,
    /// Available index of each ring at the last call of `kick` for it.
    kicked: [u16; 3],
    /// Number of interrupts handled so far.
    interrupts: usize,
    /// Offset in [`TX_AREA`] at which the next packet is written.
    tx_at: u64,
}

impl VsockGuest {
    /// Returns a guest whose device is active.
    pub fn new(event_idx: bool) -> Self {
        let harness = DeviceHarness::new(memory(MEMORY_BYTES));
        let rings =
            [0, 1, 2].map(|i| Ring::new(&harness.memory, RING_ADDRESSES[i], QUEUE_SIZES[i]));
        let (sender, host) = channel();
        let config = VsockConfig {
            guest_cid: GUEST_CID,
            host_ports: vec![1024, 1025],
        };
        let listener =
            move |port, stream| sender.send((port, stream)).map_err(std::io::Error::other);
        let mut guest = Self {
            device: Vsock::new(config, Box::new(listener)),
            harness,
            rings,
            host,
            received: VecDeque::new(),
            events: 0,
            refill: true,
            event_idx,
            kicked: [0; 3],
            interrupts: 0,
            tx_at: 0,
        };
        guest.activate();
        guest
    }

    /// Starts the driver with new rings, without receive buffers.
    pub fn activate(&mut self) {
        self.rings =
            [0, 1, 2].map(|i| Ring::new(&self.harness.memory, RING_ADDRESSES[i], QUEUE_SIZES[i]));
        self.kicked = [0; 3];
        let queues = self.rings.iter().map(|r| r.queue(self.event_idx)).collect();
        let activation = self.harness.activation(queues, 0);
        self.device.activate(activation).unwrap();
    }

    /// Returns a guest that has filled its receive queue, as every driver does first.
    pub fn ready() -> Self {
        let mut guest = Self::new(true);
        guest.fill();
        guest
    }

    /// Sets the timeouts, in milliseconds.
    pub fn set_timeouts(&mut self, connect: u64, close: u64, credit: u64) {
        self.device.set_timeouts(VsockTimeouts {
            connect: Duration::from_millis(connect),
            close: Duration::from_millis(close),
            credit: Duration::from_millis(credit),
        });
    }

    /// Fills the empty receive queue with buffers.
    pub fn fill(&mut self) {
        for i in 0..u64::from(QUEUE_SIZES[RX_QUEUE]) {
            self.rings[RX_QUEUE].add(&[writable(RX_AREA + i * 4096, RX_BUFFER_BYTES)]);
        }
        self.kick(RX_QUEUE).unwrap();
    }

    /// Adds `count` receive buffers.
    pub fn add_rx_buffers(&mut self, count: u16) {
        for _ in 0..count {
            self.add_rx_buffer();
        }
        self.kick(RX_QUEUE).unwrap();
    }

    fn add_rx_buffer(&mut self) {
        // Index of the descriptor, from which `handle_interrupt` derives the address.
        let index = u64::from(self.avail(RX_QUEUE) % QUEUE_SIZES[RX_QUEUE]);
        self.rings[RX_QUEUE].add(&[writable(RX_AREA + index * 4096, RX_BUFFER_BYTES)]);
    }

    fn avail(&self, ring: usize) -> u16 {
        let at = GuestAddress(self.rings[ring].avail_addr() + 2);
        self.harness.memory.read_obj(at).unwrap()
    }

    /// Kicks if the device requests it (virtio 1.2 sections 2.7.7 and 2.7.10).
    pub fn kick(&mut self, ring: usize) -> Result<(), DeviceError> {
        let new = self.avail(ring);
        let old = std::mem::replace(&mut self.kicked[ring], new);
        let needs_kick = if self.event_idx {
            let event = self.rings[ring].avail_event();
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            let flags = GuestAddress(self.rings[ring].used_addr());
            self.harness.memory.read_obj::<u16>(flags).unwrap() & 1 == 0
        };
        if needs_kick {
            self.device.queue_event(ring)?;
        }
        self.handle_interrupt();
        Ok(())
    }

    /// Handles pending interrupts.
    pub fn handle_interrupt(&mut self) {
        while self.interrupts != self.harness.interrupt.queue_count() {
            self.interrupts = self.harness.interrupt.queue_count();
            let used = self.rings[RX_QUEUE].used();
            for &(head, len) in &used {
                let at = RX_AREA + u64::from(head) * 4096;
                let mut bytes = vec![0; usize::try_from(len).unwrap()];
                let memory = &self.harness.memory;
                memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
                let data = bytes.split_off(HEADER_BYTES);
                let header = VsockHeader::from_bytes(&bytes.try_into().unwrap());
                assert_eq!(usize::try_from(header.len).unwrap(), data.len());
                self.received.push_back((header, data));
            }
            self.events += self.rings[EVENT_QUEUE].used().len();
            self.rings[TX_QUEUE].used();
            for ring in &self.rings {
                ring.set_used_event(ring.used_idx());
            }
            if self.refill && !used.is_empty() {
                self.add_rx_buffers(u16::try_from(used.len()).unwrap());
            }
        }
    }

    /// Runs the event loop once, for at most `limit_ms`. Returns the number of events.
    pub fn poll_events(&mut self, limit_ms: u16) -> usize {
        let ready = self.harness.ready(limit_ms);
        for r in &ready {
            self.device.host_event(r.token, r.flags).unwrap();
        }
        self.handle_interrupt();
        ready.len()
    }

    /// Runs the event loop until nothing is ready.
    pub fn run_until_idle(&mut self) {
        while self.poll_events(0) > 0 {}
    }

    /// Returns the next packet of any connection, within five seconds.
    pub fn next(&mut self) -> (VsockHeader, Vec<u8>) {
        let limit = Instant::now() + Duration::from_secs(5);
        while self.received.is_empty() {
            assert!(Instant::now() < limit, "no packet arrived");
            self.poll_events(20);
        }
        self.received.pop_front().unwrap()
    }

    /// Asserts that no packet is pending.
    pub fn assert_idle(&mut self) {
        self.run_until_idle();
        assert_eq!(self.received, []);
    }

    /// Asserts that the event loop is idle after the timers for credit and for sent packets have
    /// fired.
    pub fn assert_quiet(&mut self) {
        self.poll_events(20);
        self.poll_events(20);
        assert_eq!(self.poll_events(20), 0);
    }

    /// Adds `header` and `data` to the transmit queue without a kick. Both together are split into
    /// descriptors of the sizes `cuts`. The last descriptor contains the rest.
    pub fn queue_packet(&mut self, header: VsockHeader, data: &[u8], cuts: &[usize]) {
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend_from_slice(data);
        let mut buffers: Vec<Buffer> = Vec::new();
        for &cut in cuts.iter().chain([&bytes.len()]) {
            let part: Vec<u8> = bytes.drain(..cut.min(bytes.len())).collect();
            if part.is_empty() {
                continue;
            }
            let len = u32::try_from(part.len()).unwrap();
            let at = TX_AREA + self.tx_at;
            let memory = &self.harness.memory;
            memory.write_slice(&part, GuestAddress(at)).unwrap();
            buffers.push(readable(at, len));
            // The gap of 7 bytes makes most addresses unaligned.
            self.tx_at = (self.tx_at + u64::from(len) + 7) % 0x80_0000;
        }
        self.rings[TX_QUEUE].add(&buffers);
    }

    /// Sends a packet like Linux: header and data in separate descriptors.
    pub fn send(&mut self, header: VsockHeader, data: &[u8]) {
        self.queue_packet(header, data, &[HEADER_BYTES]);
        self.kick(TX_QUEUE).unwrap();
    }

    /// Connects the host to `port` of the guest. Returns the host's end of the stream.
    pub fn connect(&mut self, port: u32) -> (UnixStream, Result<(), VsockConnectError>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let outcome = self.device.connect(port, theirs.into());
        self.handle_interrupt();
        (ours, outcome)
    }

    /// Opens a connection from the host to `port`. Returns both ends.
    pub fn connected_by_host(&mut self, port: u32, buf_alloc: u32) -> (GuestSocket, UnixStream) {
        let (stream, outcome) = self.connect(port);
        outcome.unwrap();
        let (request, _) = self.next();
        assert_eq!(request.op, VsockOp::Request as u16);
        let mut link = GuestSocket::new(port, request.src_port, buf_alloc);
        link.update_credit(&request);
        let response = link.header(VsockOp::Response);
        self.send(response, &[]);
        (link, stream)
    }

    /// Opens a connection from the guest's `port` to host port 1024. Returns both ends.
    pub fn connected_by_guest(&mut self, port: u32, buf_alloc: u32) -> (GuestSocket, UnixStream) {
        let mut link = GuestSocket::new(port, 1024, buf_alloc);
        self.send(link.header(VsockOp::Request), &[]);
        let (response, _) = self.next();
        assert_eq!(response.op, VsockOp::Response as u16);
        link.update_credit(&response);
        let (_, stream) = self.host.try_recv().unwrap();
        (link, stream)
    }

    /// Returns the operation of the next packet.
    pub fn op(&mut self) -> u16 {
        self.next().0.op
    }

    /// Returns the operation of the next packet, whose credit is added to `link`.
    pub fn op_of(&mut self, link: &mut GuestSocket) -> u16 {
        let header = self.next().0;
        link.update_credit(&header);
        header.op
    }
}

/// Guest side of one connection.
#[derive(Debug, Clone)]
pub struct GuestSocket {
    /// Port of the guest.
    pub guest: u32,
    /// Port of the host.
    pub host: u32,
    /// Size of the guest's receive buffer.
    pub buf_alloc: u32,
    /// Number of bytes that the guest has consumed.
    pub fwd_cnt: u32,
    /// Number of bytes that the guest has sent.
    pub sent: u32,
    /// Size of the device's receive buffer, as last announced.
    host_alloc: u32,
    /// Number of bytes that the host has consumed, as last announced.
    pub host_fwd: u32,
}

impl GuestSocket {
    /// Returns a connection that has not transferred data.
    pub fn new(guest: u32, host: u32, buf_alloc: u32) -> Self {
        Self {
            guest,
            host,
            buf_alloc,
            fwd_cnt: 0,
            sent: 0,
            host_alloc: 0,
            host_fwd: 0,
        }
    }

    /// Returns the header of a packet without data.
    pub fn header(&self, op: VsockOp) -> VsockHeader {
        VsockHeader {
            src_cid: u64::from(GUEST_CID),
            dst_cid: HOST_CID,
            src_port: self.guest,
            dst_port: self.host,
            len: 0,
            kind: TYPE_STREAM,
            op: op as u16,
            flags: 0,
            buf_alloc: self.buf_alloc,
            fwd_cnt: self.fwd_cnt,
        }
    }

    /// Returns the header of a packet with `len` bytes of data, and counts them as sent.
    pub fn data(&mut self, len: usize) -> VsockHeader {
        let len = u32::try_from(len).unwrap();
        self.sent = self.sent.wrapping_add(len);
        VsockHeader {
            len,
            ..self.header(VsockOp::Rw)
        }
    }

    /// Returns the header of a packet that closes the directions `flags` (`header::SHUT_*`).
    pub fn shutdown(&self, flags: u32) -> VsockHeader {
        VsockHeader {
            flags,
            ..self.header(VsockOp::Shutdown)
        }
    }

    /// Records the credit that the device announces in a packet.
    pub fn update_credit(&mut self, header: &VsockHeader) {
        self.host_alloc = header.buf_alloc;
        self.host_fwd = header.fwd_cnt;
    }

    /// Returns the number of bytes for which the device has buffer space.
    pub fn available(&self) -> usize {
        let free = self.host_alloc - self.sent.wrapping_sub(self.host_fwd);
        usize::try_from(free).unwrap()
    }
}

/// Bytes without a period related to a buffer size (xorshift64*).
#[derive(Debug, Clone)]
pub struct Pattern(pub u64);

impl Pattern {
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.number()).unwrap() % limit
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count)
            .map(|_| u8::try_from(self.number() & 0xff).unwrap())
            .collect()
    }
}
