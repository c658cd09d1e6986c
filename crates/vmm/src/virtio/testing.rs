//! Driver side of virtio for tests and fuzzers: split virtqueues in guest memory. [`Ring::add`]
//! writes them correctly. The raw setters write them arbitrarily, like a hostile driver.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation
)]

use super::{Activation, Interrupt};
use crate::GuestMemory;
use crate::poll::{Poller, ReadyEvent};
use nix::sys::epoll::EpollTimeout;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// `VIRTQ_DESC_F_NEXT` (virtio 1.2 section 2.7.5).
pub const NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`.
pub const WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`.
pub const INDIRECT: u16 = 4;

/// Returns guest memory with one region of `bytes` bytes (a multiple of the page size) at address
/// 0.
pub fn memory(bytes: usize) -> GuestMemory {
    memory_with(&[(0, bytes)])
}

/// Returns guest memory with the `(address, bytes)` regions.
pub fn memory_with(regions: &[(u64, usize)]) -> GuestMemory {
    let ranges: Vec<_> = regions
        .iter()
        .map(|&(address, bytes)| (GuestAddress(address), bytes))
        .collect();
    GuestMemory::from_ranges(&ranges).unwrap()
}

/// Buffer of a descriptor chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Guest address.
    pub addr: u64,
    /// Length, in bytes.
    pub len: u32,
    /// True if the device writes the buffer, false if it reads the buffer.
    pub writable: bool,
}

/// Returns a buffer that the device reads.
pub fn readable(addr: u64, len: u32) -> Buffer {
    Buffer {
        addr,
        len,
        writable: false,
    }
}

/// Returns a buffer that the device writes.
pub fn writable(addr: u64, len: u32) -> Buffer {
    Buffer {
        addr,
        len,
        writable: true,
    }
}

/// Driver side of a split virtqueue: descriptor table, available ring and used ring, in this order.
#[derive(Debug)]
pub struct Ring {
    memory: GuestMemory,
    base: u64,
    size: u16,
    /// Descriptor at which the next chain begins.
    free: u16,
    /// Value of the available index in memory.
    avail: u16,
    /// Used index up to which [`Ring::used`] has returned chains.
    seen: u16,
}

impl Ring {
    /// Creates an empty ring of `size` descriptors (a power of two) at `base` (16-byte aligned). It
    /// occupies [`Ring::bytes`] bytes.
    pub fn new(memory: &GuestMemory, base: u64, size: u16) -> Self {
        let ring = Self {
            memory: memory.clone(),
            base,
            size,
            free: 0,
            avail: 0,
            seen: 0,
        };
        let zeroes = vec![0; usize::try_from(Self::bytes(size)).unwrap()];
        memory.write_slice(&zeroes, GuestAddress(base)).unwrap();
        ring
    }

    /// Returns the number of bytes that a ring of `size` descriptors occupies.
    pub fn bytes(size: u16) -> u64 {
        // Flags, index and `avail_event` of 2 bytes each, and 8 bytes per used chain.
        Self::used_offset(size) + 6 + 8 * u64::from(size)
    }

    fn used_offset(size: u16) -> u64 {
        // 16 bytes per descriptor. In the available ring, 2 bytes per entry, and flags, index and
        // `used_event` of 2 bytes each. The used ring is aligned to 4 bytes.
        (18 * u64::from(size) + 6).next_multiple_of(4)
    }

    /// Returns the number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns the guest address of the descriptor table.
    pub fn desc_addr(&self) -> u64 {
        self.base
    }

    /// Returns the guest address of the available ring.
    pub fn avail_addr(&self) -> u64 {
        self.base + 16 * u64::from(self.size)
    }

    /// Returns the guest address of the used ring.
    pub fn used_addr(&self) -> u64 {
        self.base + Self::used_offset(self.size)
    }

    /// Returns the device side of this ring, ready, with or without `VIRTIO_F_EVENT_IDX`.
    pub fn queue(&self, event_idx: bool) -> Queue {
        let mut queue = Queue::new(self.size).unwrap();
        // The truncation is intended: the setters take the two halves of an address.
        let split = |a: u64| (Some(a as u32), Some((a >> 32) as u32));
        let (low, high) = split(self.desc_addr());
        queue.set_desc_table_address(low, high);
        let (low, high) = split(self.avail_addr());
        queue.set_avail_ring_address(low, high);
        let (low, high) = split(self.used_addr());
        queue.set_used_ring_address(low, high);
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        queue
    }

    /// Writes descriptor `index` without any checks.
    pub fn set_descriptor(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.set_descriptor_at(self.base + 16 * u64::from(index), addr, len, flags, next);
    }

    /// Writes a descriptor at any address, for custom indirect tables.
    pub fn set_descriptor_at(&self, at: u64, addr: u64, len: u32, flags: u16, next: u16) {
        let raw = RawDescriptor::from(Descriptor::new(addr, len, flags, next));
        self.memory.write_obj(raw, GuestAddress(at)).unwrap();
    }

    /// Adds a chain and makes it available. Returns its head. Descriptors are used in order and
    /// wrap around, so at most `size` may be outstanding.
    pub fn add(&mut self, buffers: &[Buffer]) -> u16 {
        assert!(!buffers.is_empty() && buffers.len() <= usize::from(self.size));
        let head = self.free;
        for (i, buffer) in buffers.iter().enumerate() {
            let next = (self.free + 1) % self.size;
            let more = i + 1 < buffers.len();
            let flags = Self::flags(buffer, more);
            self.set_descriptor(self.free, buffer.addr, buffer.len, flags, next);
            self.free = next;
        }
        self.publish(head);
        head
    }

    /// Adds a chain whose descriptors are in an indirect table at `table`. Returns its head.
    pub fn add_indirect(&mut self, table: u64, buffers: &[Buffer]) -> u16 {
        for (i, buffer) in buffers.iter().enumerate() {
            let more = i + 1 < buffers.len();
            let at = table + 16 * i as u64;
            let flags = Self::flags(buffer, more);
            self.set_descriptor_at(at, buffer.addr, buffer.len, flags, i as u16 + 1);
        }
        let head = self.free;
        self.set_descriptor(head, table, 16 * buffers.len() as u32, INDIRECT, 0);
        self.free = (self.free + 1) % self.size;
        self.publish(head);
        head
    }

    fn flags(buffer: &Buffer, more: bool) -> u16 {
        u16::from(more) * NEXT + u16::from(buffer.writable) * WRITE
    }

    /// Adds `head` to the available ring and advances its index, without any checks.
    pub fn publish(&mut self, head: u16) {
        let slot = self.avail_addr() + 4 + 2 * u64::from(self.avail % self.size);
        self.memory.write_obj(head, GuestAddress(slot)).unwrap();
        self.set_avail_idx(self.avail.wrapping_add(1));
    }

    /// Sets the available index to any value.
    pub fn set_avail_idx(&mut self, index: u16) {
        self.avail = index;
        let at = GuestAddress(self.avail_addr() + 2);
        // Release: a device that reads this index also reads the descriptors and the entry.
        self.memory.store(index, at, Ordering::Release).unwrap();
    }

    /// Sets `used_event`: with event-idx, the device interrupts when the used index passes it.
    pub fn set_used_event(&self, index: u16) {
        let at = self.avail_addr() + 4 + 2 * u64::from(self.size);
        self.memory.write_obj(index, GuestAddress(at)).unwrap();
    }

    /// Returns `avail_event`: with event-idx, the device requests a kick when the available index
    /// passes it.
    pub fn avail_event(&self) -> u16 {
        let at = self.used_addr() + 4 + 8 * u64::from(self.size);
        self.memory.read_obj(GuestAddress(at)).unwrap()
    }

    /// Returns the index of the used ring.
    pub fn used_idx(&self) -> u16 {
        let at = GuestAddress(self.used_addr() + 2);
        // Acquire: the entries below this index are read after it.
        self.memory.load(at, Ordering::Acquire).unwrap()
    }

    /// Returns the chains used since the last call, in order: head and number of written bytes.
    pub fn used(&mut self) -> Vec<(u16, u32)> {
        let mut used = Vec::new();
        while self.seen != self.used_idx() {
            let at = self.used_addr() + 4 + 8 * u64::from(self.seen % self.size);
            let id: u32 = self.memory.read_obj(GuestAddress(at)).unwrap();
            let len: u32 = self.memory.read_obj(GuestAddress(at + 4)).unwrap();
            used.push((u16::try_from(id).unwrap(), len));
            self.seen = self.seen.wrapping_add(1);
        }
        used
    }
}

/// Counts the interrupts that a device raised.
#[derive(Debug, Default)]
pub struct CountingInterrupt {
    queue: AtomicUsize,
    config: AtomicUsize,
}

impl CountingInterrupt {
    /// Returns the number of queue interrupts so far.
    pub fn queue_count(&self) -> usize {
        self.queue.load(Ordering::SeqCst)
    }

    /// Returns the number of configuration interrupts so far.
    pub fn config_count(&self) -> usize {
        self.config.load(Ordering::SeqCst)
    }
}

impl Interrupt for CountingInterrupt {
    fn queue(&self) {
        self.queue.fetch_add(1, Ordering::SeqCst);
    }

    fn config(&self) {
        self.config.fetch_add(1, Ordering::SeqCst);
    }
}

/// Environment of a device under test: memory, interrupt line and event loop.
#[derive(Debug, Clone)]
pub struct DeviceHarness {
    /// Guest memory.
    pub memory: GuestMemory,
    /// Interrupts raised so far.
    pub interrupt: Arc<CountingInterrupt>,
    /// Event loop, in which the device has slot 0.
    pub poller: Poller,
}

impl DeviceHarness {
    /// Creates a harness with `memory`.
    pub fn new(memory: GuestMemory) -> Self {
        Self {
            memory,
            interrupt: Arc::new(CountingInterrupt::default()),
            poller: Poller::new().unwrap(),
        }
    }

    /// Returns the resources that the transport passes to the device at `DRIVER_OK`.
    pub fn activation(&self, queues: Vec<Queue>, features: u64) -> Activation {
        Activation {
            memory: self.memory.clone(),
            queues,
            interrupt: self.interrupt.clone(),
            features,
            poller: self.poller.slot(0),
        }
    }

    /// Returns the device's host descriptors that become ready within `limit_ms`. Empty if none
    /// does.
    pub fn ready(&self, limit_ms: u16) -> Vec<ReadyEvent> {
        let mut ready = Vec::new();
        self.poller
            .wait(EpollTimeout::from(limit_ms), |r| ready.push(r))
            .unwrap();
        ready
    }
}
