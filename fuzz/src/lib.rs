//! Hostile driver shared by the device targets: it decodes a plan from the fuzzer's input and
//! executes it on a device through the trait that the transport uses.

pub mod tree;

use jiffy_vmm::GuestMemory;
use jiffy_vmm::virtio::VirtioDevice;
use jiffy_vmm::virtio::testing::{Buffer, DeviceHarness, INDIRECT, NEXT, Ring, WRITE, memory_with};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// Two adjacent regions and, after a hole, a third one, so that buffers can cross a border, start
/// in the hole, or exceed the end.
const REGIONS: [(u64, usize); 3] = [(0, 0x1_0000), (0x1_0000, 0x1_0000), (0x3_0000, 0x1_0000)];
/// Maximum steps of one plan.
const STEPS: usize = 64;
/// Offsets at which accesses to configuration spaces are likely to fail.
const OFFSETS: [u64; 8] = [0, 4, 8, 60, 0xff, 1 << 32, u64::MAX - 3, u64::MAX];

/// The fuzzer's input, read from the front; zeroes follow its end.
pub struct Input<'i>(&'i [u8]);

impl<'i> Input<'i> {
    /// The input as the fuzzer gave it.
    pub fn new(data: &'i [u8]) -> Self {
        Self(data)
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let count = N.min(self.0.len());
        bytes[..count].copy_from_slice(&self.0[..count]);
        self.0 = &self.0[count..];
        bytes
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// The next eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A guest address: mostly in memory, sometimes in the hole, after the end of memory, or at the
    /// end of the address space.
    pub fn addr(&mut self) -> u64 {
        match self.u8() {
            0xff => u64::MAX - u64::from(self.u8()),
            0xfe => self.u64(),
            high => u64::from(high % 5) << 16 | u64::from(self.u16()),
        }
    }

    /// A buffer: mostly short, sometimes of the maximum length of a descriptor.
    fn buffer(&mut self) -> Buffer {
        let addr = self.addr();
        let kind = self.u8();
        let len = match kind >> 1 & 7 {
            0 => 1,
            1 => 16,
            2 => u32::from(self.u8()) * 512,
            3 => u32::MAX - u32::from(self.u8()),
            4 => self.u32(),
            _ => u32::from(self.u16()),
        };
        Buffer {
            addr,
            len,
            writable: kind & 1 == 1,
        }
    }
}

/// Setup of one queue by the driver: valid, or with addresses and a size from the input.
enum Layout {
    /// Addresses and size of the ring that the driver uses.
    Honest,
    /// Size, addresses (descriptors, available ring, used ring) and readiness from the input.
    Raw {
        size: u16,
        at: [u64; 3],
        ready: bool,
    },
}

/// The driver that executes the plan.
pub struct Driver {
    harness: DeviceHarness,
    rings: Vec<Ring>,
    layouts: Vec<Layout>,
    event_idx: bool,
    features: u64,
}

/// Returns the low and the high half of an address.
fn split(addr: u64) -> (Option<u32>, Option<u32>) {
    (Some(addr as u32), Some((addr >> 32) as u32))
}

impl Driver {
    fn new(device: &impl VirtioDevice, memory: GuestMemory, input: &mut Input<'_>) -> Self {
        // Each of the low bits makes the setup of one queue invalid. The highest bit disables
        // `VIRTIO_F_EVENT_IDX`.
        let flags = input.u8();
        let mut rings = Vec::new();
        let mut layouts = Vec::new();
        for (index, &max) in device.queue_sizes().iter().enumerate() {
            // Small rings, so that wrapping around them is reached.
            let size = max.min(1 << (input.u8() % 5));
            rings.push(Ring::new(&memory, 0x1000 * (index as u64 + 1), size));
            layouts.push(if flags >> index & 1 == 0 {
                Layout::Honest
            } else {
                Layout::Raw {
                    size: 1 << (input.u8() % 16),
                    at: [input.addr() & !15, input.addr() & !1, input.addr() & !3],
                    ready: input.u8() & 1 == 0,
                }
            });
        }
        Self {
            harness: DeviceHarness::new(memory),
            rings,
            layouts,
            event_idx: flags & 0x80 == 0,
            features: input.u64() & device.features(),
        }
    }

    /// Returns the queues of the device with the addresses and sizes of their layouts.
    fn queues(&self, device: &impl VirtioDevice) -> Vec<Queue> {
        let sizes = device.queue_sizes();
        let mut queues = Vec::new();
        for ((layout, ring), &max) in self.layouts.iter().zip(&self.rings).zip(sizes) {
            let mut queue = ring.queue(self.event_idx);
            if let Layout::Raw { size, at, ready } = layout {
                queue = Queue::new(max).unwrap();
                queue.set_size(*size);
                let (low, high) = split(at[0]);
                queue.set_desc_table_address(low, high);
                let (low, high) = split(at[1]);
                queue.set_avail_ring_address(low, high);
                let (low, high) = split(at[2]);
                queue.set_used_ring_address(low, high);
                queue.set_event_idx(self.event_idx);
                queue.set_ready(*ready);
            }
            queues.push(queue);
        }
        queues
    }

    fn activate(&self, device: &mut impl VirtioDevice) {
        let queues = self.queues(device);
        let _ = device.activate(self.harness.activation(queues, self.features));
    }

    /// Writes to guest memory. Ignores addresses outside of it.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        let _ = self.harness.memory.write(bytes, GuestAddress(addr));
    }

    /// Makes a chain available in queue `index`, like a correct driver.
    pub fn add(&mut self, index: usize, buffers: &[Buffer]) {
        let ring = &mut self.rings[index];
        if buffers.len() <= usize::from(ring.size()) {
            ring.add(buffers);
        }
    }

    /// Executes a step on the rings. Kinds: 0 adds a chain with its buffers in the order of the
    /// specification, 1 in any order, 2 with an indirect table. 3 writes a descriptor, 4 and 5
    /// publish indexes. Returns `false` if `kind` is another kind of step.
    fn touch_rings(&mut self, kind: u8, input: &mut Input<'_>) -> bool {
        let index = usize::from(input.u8()) % self.rings.len();
        let ring = &mut self.rings[index];
        match kind {
            0 | 1 => {
                let count = 1 + usize::from(input.u8() % 4);
                let mut buffers: Vec<Buffer> = (0..count).map(|_| input.buffer()).collect();
                if kind == 0 {
                    // Use the order of the specification, so that devices process the data.
                    buffers.sort_by_key(|b| b.writable);
                }
                buffers.truncate(usize::from(ring.size()));
                ring.add(&buffers);
            }
            2 => {
                let table = u64::from(input.u16() & !15);
                let count = 1 + usize::from(input.u8() % 16);
                let mut buffers: Vec<Buffer> = (0..count).map(|_| input.buffer()).collect();
                buffers.sort_by_key(|b| b.writable);
                // The table must not extend beyond the end of the region in which it starts.
                ring.add_indirect(table.min(0xff00), &buffers);
            }
            3 => {
                let buffer = input.buffer();
                let flags = input.u16() & (NEXT | WRITE | INDIRECT);
                let at = input.u16() % ring.size();
                ring.set_descriptor(at, buffer.addr, buffer.len, flags, input.u16() % 20);
            }
            // A ring has at most 16 descriptors, so some indexes are invalid.
            4 => ring.publish(input.u16() % 20),
            5 => ring.set_avail_idx(input.u16()),
            _ => return false,
        }
        true
    }
}

/// Runs one plan on `device`. `special` executes steps that are specific to this kind of device.
pub fn run<D: VirtioDevice>(
    device: &mut D,
    input: &mut Input<'_>,
    mut special: impl FnMut(&mut D, &mut Input<'_>),
) {
    run_with(device, input, |device, _, input| special(device, input));
}

/// Like [`run`], for devices whose requests random input would rarely produce.
pub fn run_with<D: VirtioDevice>(
    device: &mut D,
    input: &mut Input<'_>,
    mut special: impl FnMut(&mut D, &mut Driver, &mut Input<'_>),
) {
    let memory = memory_with(&REGIONS);
    let mut driver = Driver::new(device, memory.clone(), input);
    driver.activate(device);
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        let kind = input.u8() % 16;
        if driver.touch_rings(kind, input) {
            continue;
        }
        match kind {
            6 | 7 => {
                // Calls that are invalid after an earlier failure must have no effect.
                let _ = device.queue_event(usize::from(input.u8() % 5));
            }
            8 => {
                device.reset();
                if input.u8() & 1 == 0 {
                    driver.activate(device);
                }
            }
            9 => {
                let mut data = [0; 16];
                let at = OFFSETS[usize::from(input.u8() % 8)];
                let len = usize::from(input.u8() % 17);
                device.read_config(at, &mut data[..len]);
            }
            10 => {
                let at = OFFSETS[usize::from(input.u8() % 8)];
                let len = usize::from(input.u8() % 17);
                device.write_config(at, &input.array::<16>()[..len]);
            }
            11 => {
                for ready in driver.harness.ready(0) {
                    let _ = device.host_event(ready.token, ready.flags);
                }
            }
            12 => {
                let flags = nix_flags(input.u32());
                let _ = device.host_event(input.u32(), flags);
            }
            13 | 14 => {
                // Content: headers, tables, page numbers.
                let addr = GuestAddress(input.addr());
                let bytes = input.array::<32>();
                let _ = memory.write(&bytes[..usize::from(input.u8() % 33)], addr);
            }
            _ => special(device, &mut driver, input),
        }
    }
    device.reset();
}

fn nix_flags(bits: u32) -> nix::sys::epoll::EpollFlags {
    nix::sys::epoll::EpollFlags::from_bits_retain(bits as i32)
}
