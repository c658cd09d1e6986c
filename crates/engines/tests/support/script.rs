//! Scripts for the kernel in `tests/guest/hostile_driver.c`: accesses to devices by a driver that
//! attacks its VMM.
//!
//! The garbage is generated here, because instructions of the guest are slow on some hosts. A seed
//! always produces the same script.

mod noise;
mod requests;

/// Memory of the guest that runs the scripts, in MiB.
pub const MEMORY_MIB: u32 = 128;
/// Byte that the guest writes to its console after the last step.
pub const END: u8 = b'E';

const RAM: u64 = (MEMORY_MIB as u64) << 20;
/// Address of the virtqueues.
const RINGS: u64 = 0x100_0000;
/// Memory of each virtqueue: its descriptors, and its rings at the two offsets below.
const RING_BYTES: u64 = 0x1_0000;
const AVAILABLE_RING: u64 = 0x4000;
const USED_RING: u64 = 0x8000;
/// Number of virtqueues for which each device has memory.
const QUEUES_PER_DEVICE: u64 = 4;
/// Address to which devices write. The kernel does not need this memory.
const DATA: u64 = 0x200_0000;
const DATA_BYTES: u64 = 16 << 20;
/// Address of page numbers and request headers, to which devices do not write.
const REQUESTS: u64 = 0x400_0000;
/// Address of the first device's registers. Each device has a page.
const MMIO: u64 = 0xd000_0000;
/// Address of the registers of the I/O APIC.
const IOAPIC: u64 = 0xfec0_0000;
/// Registers of a device (virtio 1.2 4.2.2). A 64-bit address has two registers, of which the first
/// one is listed.
const DRIVER_FEATURES: u64 = 0x20;
const DRIVER_FEATURES_PAGE: u64 = 0x24;
const QUEUE_SELECT: u64 = 0x30;
const QUEUE_SIZE: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const QUEUE_NOTIFY: u64 = 0x50;
const STATUS: u64 = 0x70;
const QUEUE_DESCRIPTORS: u64 = 0x80;
const QUEUE_AVAILABLE: u64 = 0x90;
const QUEUE_USED: u64 = 0xa0;
const CONFIGURATION: u64 = 0x100;
/// Values of the status register (2.1). Each step of a set-up adds a flag to the earlier ones.
const DRIVER: u64 = 3;
const FEATURES_OK: u64 = 11;
const DRIVER_OK: u64 = 15;
const NEEDS_RESET: u64 = 64;
const FAILED: u64 = 128;
/// Entries of each ring. The smallest queue of any device has this size.
const SIZE: u64 = 8;
/// Number of pages of garbage in the ramdisk.
const PAGES: usize = 48;
const PAGE: usize = 4096;

/// Device as the guest sees it: index of its MMIO page, number of queues, kind.
#[derive(Clone, Copy)]
struct Device {
    page: u64,
    queues: u64,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Blk,
    Vsock,
    Net,
    Rng,
    Balloon,
}

/// Devices in the order of a machine with two disks and all other devices.
const DEVICES: [Device; 6] = {
    const fn device(page: u64, queues: u64, kind: Kind) -> Device {
        Device { page, queues, kind }
    }
    [
        device(0, 1, Kind::Blk),
        device(1, 1, Kind::Blk),
        device(2, 3, Kind::Vsock),
        device(3, 2, Kind::Net),
        device(4, 1, Kind::Rng),
        device(5, 3, Kind::Balloon),
    ]
};

/// xorshift64*: sufficient for garbage, and reproducible.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Returns `true` with a probability of 1 in `n`.
    fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        let at = self.below(all.len().try_into().unwrap());
        all[usize::try_from(at).unwrap()]
    }
}

/// Operation: `struct step` of hostile_driver.c.
#[derive(Clone, Copy)]
#[repr(u8)]
enum What {
    End,
    /// Writes to a memory address, which may be a register.
    Store,
    /// Reads from a memory address.
    Load,
    /// Writes to a port.
    Out,
    /// Copies a part of the ramdisk to memory.
    Copy,
    /// Reads a register and prints whether one of its bits is set.
    Ask,
}

struct Script {
    random: Random,
    steps: Vec<[u8; 16]>,
    /// Garbage and rings, which follow the steps in the ramdisk.
    pool: Vec<u8>,
    /// Indexes of the copy steps. Their offsets are final when the number of steps is known.
    copies: Vec<usize>,
}

/// Returns the ramdisk for `seed` and the number of accesses that it requests.
pub fn ramdisk(seed: u64) -> (Vec<u8>, usize) {
    let mut script = Script {
        // Small seeds must differ in many bits, and xorshift needs a state other than zero.
        random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
        steps: Vec::new(),
        pool: Vec::new(),
        copies: Vec::new(),
    };
    for _ in 0..PAGES * PAGE / 8 {
        let word = script.random.next();
        script.pool.extend(word.to_le_bytes());
    }
    for _ in 0..60 {
        let device = script.random.of(&DEVICES);
        match script.random.below(8) {
            0 => script.noise(device),
            1 => script.reset_storm(device),
            2 => script.ports(),
            _ => script.send_invalid_data(device),
        }
    }
    // Last, because interrupts with wrong vectors may end the guest.
    if script.random.once_in(2) {
        script.interrupts();
    }
    script.step(What::End, 0, 0, 0, 0);
    script.finish()
}

impl Script {
    /// Appends a step in the format of `struct step`.
    fn step(&mut self, what: What, width: u8, port: u16, address: u64, value: u64) {
        let mut step = [0; 16];
        step[0] = what as u8;
        step[1] = width;
        step[2..4].copy_from_slice(&port.to_le_bytes());
        step[4..8].copy_from_slice(&u32::try_from(address).unwrap().to_le_bytes());
        step[8..].copy_from_slice(&value.to_le_bytes());
        self.steps.push(step);
    }

    /// Returns the ramdisk (the steps, followed by the pool) and the number of steps.
    fn finish(mut self) -> (Vec<u8>, usize) {
        let start = self.steps.len() * 16;
        for &at in &self.copies {
            let offset = u32::from_le_bytes(self.steps[at][8..12].try_into().unwrap());
            let offset = offset + u32::try_from(start).unwrap();
            self.steps[at][8..12].copy_from_slice(&offset.to_le_bytes());
        }
        let count = self.steps.len();
        let mut disk: Vec<u8> = self.steps.concat();
        disk.extend(&self.pool);
        // The ramdisk occupies the last pages of memory. Writes of devices to a chain that ends at
        // the end of memory hit only this padding.
        disk.resize(disk.len() + 16 * PAGE, 0);
        (disk, count)
    }

    /// Writes bytes to guest memory.
    fn put(&mut self, address: u64, bytes: &[u8]) {
        let offset = self.pool.len();
        self.pool.extend(bytes);
        self.pool.resize(self.pool.len().next_multiple_of(8), 0);
        let length = u64::try_from(self.pool.len() - offset).unwrap();
        self.copy(address, offset, length);
    }

    /// Copies a range of the pool to guest memory.
    fn copy(&mut self, address: u64, offset: usize, length: u64) {
        self.copies.push(self.steps.len());
        let value = u64::try_from(offset).unwrap() | length << 32;
        self.step(What::Copy, 0, 0, address, value);
    }

    /// Fills a page with garbage.
    fn garbage(&mut self, address: u64) {
        let page = self.random.below(PAGES.try_into().unwrap());
        let offset = usize::try_from(page).unwrap() * PAGE;
        self.copy(address, offset, PAGE.try_into().unwrap());
    }

    /// Writes the lower 32 bits of `value` to a register.
    fn register(&mut self, device: Device, offset: u64, value: u64) {
        let address = MMIO + device.page * 0x1000 + offset;
        self.step(What::Store, 4, 0, address, value & 0xffff_ffff);
    }

    /// Notifies the device of a queue, which sometimes does not exist.
    fn notify(&mut self, device: Device) {
        let queue = if self.random.once_in(8) {
            self.random.next()
        } else {
            self.random.below(device.queues)
        };
        self.register(device, QUEUE_NOTIFY, queue);
    }

    /// Queries whether the device is out of service (`DEVICE_NEEDS_RESET`).
    fn query_status(&mut self, device: Device) {
        let address = MMIO + device.page * 0x1000 + STATUS;
        self.step(What::Ask, 4, 0, address, NEEDS_RESET);
    }

    /// Sets the device up almost correctly, and then sends it invalid data.
    fn send_invalid_data(&mut self, device: Device) {
        self.set_up(device);
        for _ in 0..=self.random.below(6) {
            self.notify(device);
            self.query_status(device);
            let queue = self.queue_of(device);
            match self.random.below(6) {
                // All entries are new, and the index may be far ahead. It follows 2 bytes of flags.
                0 => {
                    let at = RINGS + queue * RING_BYTES + AVAILABLE_RING + 2;
                    let index = self.random.next();
                    self.step(What::Store, 2, 0, at, index & 0xffff);
                }
                1 => self.garbage(RINGS + queue * RING_BYTES),
                2 => self.garbage(RINGS + queue * RING_BYTES + AVAILABLE_RING),
                3 => self.rings(device, queue),
                4 => self.configuration(device),
                // Change the addresses of the queues while the device uses them.
                _ => self.addresses(device, queue),
            }
        }
        self.notify(device);
        self.query_status(device);
    }

    /// Returns the number of one of the device's virtqueues among all virtqueues.
    fn queue_of(&mut self, device: Device) -> u64 {
        device.page * QUEUES_PER_DEVICE + self.random.below(device.queues)
    }

    /// Negotiates features and configures the queues.
    fn set_up(&mut self, device: Device) {
        // A status of 0 resets the device.
        self.register(device, STATUS, 0);
        self.register(device, STATUS, DRIVER);
        for page in 0..2 {
            self.register(device, DRIVER_FEATURES_PAGE, page);
            let features = match self.random.below(10) {
                0 => self.random.next(),
                // Page 1, features 32 to 63: VERSION_1.
                _ if page == 1 => 1,
                // Page 0, features 0 to 31: event indices and indirect descriptors, which every
                // device offers.
                _ => self.random.of(&[0, 1 << 28, 1 << 29, 3 << 28]),
            };
            // Features that are not offered would only be rejected.
            let features = if page == 1 { features & 1 } else { features };
            self.register(device, DRIVER_FEATURES, features);
        }
        self.register(device, STATUS, FEATURES_OK);
        for queue in 0..device.queues {
            let number = device.page * QUEUES_PER_DEVICE + queue;
            self.rings(device, number);
            self.addresses(device, number);
        }
        self.register(device, STATUS, DRIVER_OK);
    }

    /// Configures the addresses of a queue, mostly correctly.
    fn addresses(&mut self, device: Device, queue: u64) {
        self.register(device, QUEUE_SELECT, queue % QUEUES_PER_DEVICE);
        let size = if self.random.once_in(20) {
            self.random.next()
        } else {
            SIZE
        };
        self.register(device, QUEUE_SIZE, size);
        for (register, offset) in [
            (QUEUE_DESCRIPTORS, 0),
            (QUEUE_AVAILABLE, AVAILABLE_RING),
            (QUEUE_USED, USED_RING),
        ] {
            let address = match self.random.below(80) {
                0 => self.random.next(),
                1 => RAM - 16,
                2 => MMIO,
                3 => u64::MAX - 15,
                _ => RINGS + queue * RING_BYTES + offset,
            };
            self.register(device, register, address);
            self.register(device, register + 4, address >> 32);
        }
        let ready = u64::from(!self.random.once_in(20));
        self.register(device, QUEUE_READY, ready);
    }

    /// Writes a descriptor table and an available ring, mostly correct.
    fn rings(&mut self, device: Device, queue: u64) {
        let mut table = Vec::new();
        let mut entry = 0;
        let mut heads: Vec<u16> = Vec::new();
        while entry < SIZE {
            let length = match device.kind {
                // A disk request has at least two descriptors.
                Kind::Blk => self.random.of(&[2, 2, 4]),
                _ => self.random.of(&[1, 1, 1, 2, 4]),
            };
            let length = length.min(SIZE - entry);
            heads.push(entry.try_into().unwrap());
            for at in 0..length {
                let last = at + 1 == length;
                let descriptor = self.descriptor(device, queue, at, last, entry + 1);
                table.extend(descriptor);
                entry += 1;
            }
        }
        self.put(RINGS + queue * RING_BYTES, &table);
        let mut available = Vec::new();
        let index = if self.random.once_in(16) {
            self.random.next().to_le_bytes()[0].into()
        } else {
            u16::try_from(heads.len()).unwrap()
        };
        available.extend(0u16.to_le_bytes());
        available.extend(index.to_le_bytes());
        for at in 0..usize::try_from(SIZE).unwrap() {
            let head = if self.random.once_in(20) {
                self.random.next().to_le_bytes()[0].into()
            } else {
                heads[at % heads.len()]
            };
            available.extend(head.to_le_bytes());
        }
        self.put(RINGS + queue * RING_BYTES + AVAILABLE_RING, &available);
    }

    /// Returns a descriptor that fits the device's protocol, unless it is corrupted on purpose.
    fn descriptor(
        &mut self,
        device: Device,
        queue: u64,
        at: u64,
        last: bool,
        next: u64,
    ) -> [u8; 16] {
        // Flags of descriptors (2.7.5).
        const NEXT: u16 = 1;
        const WRITE: u16 = 2;
        const INDIRECT: u16 = 4;
        // 44 is the length of the header of a vsock packet.
        let (mut address, mut length) = (
            DATA + self.random.below(DATA_BYTES - (1 << 20)),
            self.random.of(&[44, 512, 512, 4096, 4096, 65_536, 1 << 20]),
        );
        let from_guest = match device.kind {
            Kind::Blk => at == 0 || (!last && self.random.once_in(2)),
            // Queue 1 transmits. Queue 0 receives, and queue 2 of vsock is for events.
            Kind::Vsock | Kind::Net => queue % QUEUES_PER_DEVICE == 1,
            // Queues 0 and 1 inflate and deflate.
            Kind::Balloon => queue % QUEUES_PER_DEVICE < 2,
            Kind::Rng => false,
        };
        if from_guest {
            let bytes = self.request(device.kind);
            address = REQUESTS + self.random.below(4096) * 4096;
            if at == 0 {
                length = u64::try_from(bytes.len()).unwrap();
            }
            self.put(address, &bytes);
        }
        let mut flags = if from_guest { 0 } else { WRITE };
        let mut next = u16::try_from(next).unwrap();
        if !last {
            flags |= NEXT;
        } else if device.kind == Kind::Blk && !from_guest {
            // The last byte of a disk request receives its status.
            length = 1;
        }
        match self.random.below(400) {
            0 => address = self.random.next(),
            1 => address = RAM - self.random.below(4096),
            2 => address = u64::MAX - self.random.below(4096),
            3 => address = MMIO + device.page * 0x1000,
            4 => length = self.random.of(&[0, 0xffff_ffff, 0x8000_0000]),
            5 => flags = self.random.next().to_le_bytes()[0].into(),
            6 => next = self.random.next().to_le_bytes()[0].into(),
            // An indirect table of garbage.
            7 => (flags, length) = (INDIRECT, 16 * (1 + self.random.below(1 << 12))),
            _ => {}
        }
        // Limit writes to the upper half of memory. The ramdisk with the script is at its end, and
        // an overwritten script would end the attack.
        if (RAM - (64 << 20)..RAM).contains(&address) && flags & WRITE != 0 {
            length = length.min(1 << 20);
        }
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..12].copy_from_slice(&u32::try_from(length).unwrap().to_le_bytes());
        descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
        descriptor[14..].copy_from_slice(&next.to_le_bytes());
        descriptor
    }
}
