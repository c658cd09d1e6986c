//! A guest with the essentials of a vsock driver. It looks at a used ring only after an interrupt and kicks only when
//! the device wants it, so that lost notifications show.

use super::super::connection::Patience;
use super::super::header::{HEADER_LEN, HOST_CID, Header, Op, STREAM};
use super::super::{ConnectError, Vsock, VsockConfig};
use crate::virtio::testing::{Buffer, Ring, Surroundings, memory, readable, writable};
use crate::virtio::{DeviceError, VirtioDevice};
use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};

pub const CID: u32 = 3;
/// A Linux guest's receive buffer: 4 KiB less what the kernel keeps for itself.
pub const RX_BYTES: u32 = 3776;
const SIZES: [u16; 3] = [128, 128, 8];
const RINGS: [u64; 3] = [0x1_0000, 0x2_0000, 0x3_0000];
pub const RX_AREA: u64 = 0x10_0000;
pub const TX_AREA: u64 = 0x20_0000;
pub const MEMORY: usize = 0x100_0000;

pub struct Guest {
    pub device: Vsock,
    pub around: Surroundings,
    pub rings: [Ring; 3],
    pub host: Receiver<(u32, UnixStream)>,
    /// Packets from the device, not looked at yet.
    pub inbox: VecDeque<(Header, Vec<u8>)>,
    pub events: usize,
    pub refill: bool,
    event_idx: bool,
    kicked: [u16; 3],
    interrupts: usize,
    tx_at: u64,
}

impl Guest {
    pub fn new(event_idx: bool) -> Self {
        let around = Surroundings::new(memory(MEMORY));
        let rings = [0, 1, 2].map(|i| Ring::new(&around.memory, RINGS[i], SIZES[i]));
        let (sender, host) = channel();
        let config = VsockConfig {
            guest_cid: CID,
            host_ports: vec![1024, 1025],
        };
        let listener =
            move |port, stream| sender.send((port, stream)).map_err(std::io::Error::other);
        let mut guest = Self {
            device: Vsock::new(config, Box::new(listener)),
            around,
            rings,
            host,
            inbox: VecDeque::new(),
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

    /// Starts the driver with fresh rings; gives the device no receive buffers yet.
    pub fn activate(&mut self) {
        self.rings = [0, 1, 2].map(|i| Ring::new(&self.around.memory, RINGS[i], SIZES[i]));
        self.kicked = [0; 3];
        let queues = self.rings.iter().map(|r| r.queue(self.event_idx)).collect();
        let activation = self.around.activation(queues, 0);
        self.device.activate(activation).unwrap();
    }

    /// A guest that has filled its receive queue, as every driver does first.
    pub fn ready() -> Self {
        let mut guest = Self::new(true);
        guest.fill();
        guest
    }

    pub fn set_patience(&mut self, connect: u64, close: u64, credit: u64) {
        self.device.set_patience(Patience {
            connect: Duration::from_millis(connect),
            close: Duration::from_millis(close),
            credit: Duration::from_millis(credit),
        });
    }

    pub fn fill(&mut self) {
        for i in 0..u64::from(SIZES[0]) {
            self.rings[0].add(&[writable(RX_AREA + i * 4096, RX_BYTES)]);
        }
        self.kick(0).unwrap();
    }

    /// Gives the device `count` receive buffers more.
    pub fn give(&mut self, count: u16) {
        for _ in 0..count {
            self.give_one();
        }
        self.kick(0).unwrap();
    }

    fn give_one(&mut self) {
        let index = u64::from(self.avail(0) % SIZES[0]);
        self.rings[0].add(&[writable(RX_AREA + index * 4096, RX_BYTES)]);
    }

    fn avail(&self, ring: usize) -> u16 {
        let at = GuestAddress(self.rings[ring].avail_addr() + 2);
        self.around.memory.read_obj(at).unwrap()
    }

    /// Kicks if the device wants it (virtio 1.2 sections 2.7.7 and 2.7.10).
    pub fn kick(&mut self, ring: usize) -> Result<(), DeviceError> {
        let new = self.avail(ring);
        let old = std::mem::replace(&mut self.kicked[ring], new);
        let wanted = if self.event_idx {
            let event = self.rings[ring].avail_event();
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            let flags = GuestAddress(self.rings[ring].used_addr());
            self.around.memory.read_obj::<u16>(flags).unwrap() & 1 == 0
        };
        if wanted {
            self.device.queue_event(ring)?;
        }
        self.interrupted();
        Ok(())
    }

    /// Handles the interrupt, if there was one.
    pub fn interrupted(&mut self) {
        while self.interrupts != self.around.interrupt.queue_count() {
            self.interrupts = self.around.interrupt.queue_count();
            let used = self.rings[0].used();
            for &(head, len) in &used {
                let at = RX_AREA + u64::from(head) * 4096;
                let mut bytes = vec![0; usize::try_from(len).unwrap()];
                let memory = &self.around.memory;
                memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
                let data = bytes.split_off(HEADER_LEN);
                let header = Header::from_bytes(&bytes.try_into().unwrap());
                assert_eq!(usize::try_from(header.len).unwrap(), data.len());
                self.inbox.push_back((header, data));
            }
            self.events += self.rings[2].used().len();
            self.rings[1].used();
            for ring in &self.rings {
                ring.set_used_event(ring.used_idx());
            }
            if self.refill && !used.is_empty() {
                self.give(u16::try_from(used.len()).unwrap());
            }
        }
    }

    /// One turn of the event loop: what the host did within `limit_ms`.
    pub fn turn(&mut self, limit_ms: u16) -> usize {
        let ready = self.around.ready(limit_ms);
        for r in &ready {
            self.device.host_event(r.token, r.flags).unwrap();
        }
        self.interrupted();
        ready.len()
    }

    /// Turns the event loop until nothing is ready.
    pub fn settle(&mut self) {
        while self.turn(0) > 0 {}
    }

    /// The next packet of any connection, within five seconds.
    pub fn next(&mut self) -> (Header, Vec<u8>) {
        let limit = Instant::now() + Duration::from_secs(5);
        while self.inbox.is_empty() {
            assert!(Instant::now() < limit, "no packet came");
            self.turn(20);
        }
        self.inbox.pop_front().unwrap()
    }

    /// Nothing comes now.
    pub fn silent(&mut self) {
        self.settle();
        assert_eq!(self.inbox, []);
    }

    /// Puts `header` and `data` into the transmit queue, cut into descriptors of the given sizes (the last takes
    /// the rest), without a kick.
    pub fn queue_packet(&mut self, header: Header, data: &[u8], cuts: &[usize]) {
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
            let memory = &self.around.memory;
            memory.write_slice(&part, GuestAddress(at)).unwrap();
            buffers.push(readable(at, len));
            self.tx_at = (self.tx_at + u64::from(len) + 7) % 0x80_0000;
        }
        self.rings[1].add(&buffers);
    }

    /// Sends a packet the way Linux does: header and data in separate descriptors.
    pub fn send(&mut self, header: Header, data: &[u8]) {
        self.queue_packet(header, data, &[HEADER_LEN]);
        self.kick(1).unwrap();
    }

    pub fn connect(&mut self, port: u32) -> (UnixStream, Result<(), ConnectError>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let outcome = self.device.connect(port, theirs.into());
        self.interrupted();
        (ours, outcome)
    }

    /// A connection that the host opened to `port`, and the host's end of it.
    pub fn dialled(&mut self, port: u32, buf_alloc: u32) -> (Link, UnixStream) {
        let (stream, outcome) = self.connect(port);
        outcome.unwrap();
        let (request, _) = self.next();
        assert_eq!(request.op, Op::Request as u16);
        let mut link = Link::new(port, request.src_port, buf_alloc);
        link.heard(&request);
        let response = link.header(Op::Response);
        self.send(response, &[]);
        (link, stream)
    }

    /// A connection that the guest opened to host port 1024, and the host's end of it.
    pub fn opened(&mut self, port: u32, buf_alloc: u32) -> (Link, UnixStream) {
        let mut link = Link::new(port, 1024, buf_alloc);
        self.send(link.header(Op::Request), &[]);
        let (response, _) = self.next();
        assert_eq!(response.op, Op::Response as u16);
        link.heard(&response);
        let (_, stream) = self.host.try_recv().unwrap();
        (link, stream)
    }

    pub fn op(&mut self) -> u16 {
        self.next().0.op
    }

    /// The operation of the next packet, which `link` learns its credit from.
    pub fn op_of(&mut self, link: &mut Link) -> u16 {
        let header = self.next().0;
        link.heard(&header);
        header.op
    }
}

/// The guest's side of one connection.
#[derive(Debug, Clone)]
pub struct Link {
    pub guest: u32,
    pub host: u32,
    pub buf_alloc: u32,
    pub fwd_cnt: u32,
    pub sent: u32,
    host_alloc: u32,
    pub host_fwd: u32,
}

impl Link {
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

    pub fn header(&self, op: Op) -> Header {
        Header {
            src_cid: u64::from(CID),
            dst_cid: HOST_CID,
            src_port: self.guest,
            dst_port: self.host,
            len: 0,
            kind: STREAM,
            op: op as u16,
            flags: 0,
            buf_alloc: self.buf_alloc,
            fwd_cnt: self.fwd_cnt,
        }
    }

    pub fn data(&mut self, len: usize) -> Header {
        let len = u32::try_from(len).unwrap();
        self.sent = self.sent.wrapping_add(len);
        Header {
            len,
            ..self.header(Op::Rw)
        }
    }

    pub fn shutdown(&self, flags: u32) -> Header {
        Header {
            flags,
            ..self.header(Op::Shutdown)
        }
    }

    pub fn heard(&mut self, header: &Header) {
        self.host_alloc = header.buf_alloc;
        self.host_fwd = header.fwd_cnt;
    }

    /// Bytes the device has room for.
    pub fn room(&self) -> usize {
        let free = self.host_alloc - self.sent.wrapping_sub(self.host_fwd);
        usize::try_from(free).unwrap()
    }
}

/// Bytes that never repeat in step with a buffer size (xorshift64*).
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
