#![no_main]
//! Requests of a hostile driver to a disk: the device never writes to the base image, and records
//! no blocks after the end of the disk.

use jiffy_fuzz::{Driver, Input, run_with};
use jiffy_vmm::virtio::VirtioDevice;
use jiffy_vmm::virtio::blk::{Block, DiskBackend};
use jiffy_vmm::virtio::testing::{readable, writable};
use libfuzzer_sys::fuzz_target;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::LazyLock;

/// Base image: a sparse file without allocated blocks. A write would allocate a block.
static BASE: LazyLock<File> = LazyLock::new(|| {
    let file = File::from(memfd_create("base", MFdFlags::empty()).unwrap());
    file.set_len(SIZE).unwrap();
    file
});
/// Size of the disk in bytes: 16 blocks and one sector.
const SIZE: u64 = 16 * 4096 + 512;

/// Adds a request that is almost valid. It consists of a header with kind and sector, the data, and
/// one byte for the device's status. The kinds are reads (0), writes (1), flushes (4), the id (8),
/// discards (11) and zeroing (13). Some sectors are beyond the end of the disk.
fn request(driver: &mut Driver, input: &mut Input<'_>) {
    let kind = [0, 1, 1, 4, 8, 11, 13, 13][usize::from(input.u8() % 8)];
    let sector = u64::from(input.u8() % 140);
    let mut header = [0; 16];
    header[0] = kind;
    header[8..].copy_from_slice(&sector.to_le_bytes());
    driver.write(0x8000, &header);
    // The segment of a discard or zeroing: sector, number of sectors, and flags.
    let sectors = u32::from(input.u8() % 40);
    let segment = u64::from(sectors) | u64::from(input.u8() & 3) << 32;
    driver.write(0x9000, &sector.to_le_bytes());
    driver.write(0x9008, &segment.to_le_bytes());
    let data = match kind {
        0 => writable(0x9000, sectors * 512),
        1 => readable(0x9000, sectors * 512),
        8 => writable(0x9000, 20),
        _ => readable(0x9000, 16),
    };
    driver.add(0, &[readable(0x8000, 16), data, writable(0x8800, 1)]);
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let kind = input.u8();
    let base = BASE.try_clone().unwrap();
    let backend = if kind & 1 == 0 {
        let overlay = File::from(memfd_create("overlay", MFdFlags::empty()).unwrap());
        DiskBackend::Overlay { base, overlay }
    } else {
        DiskBackend::ReadOnly(base)
    };
    let mut block = Block::new("blk0", backend)
        .unwrap()
        .flush_to_host(kind & 2 == 0);
    run_with(&mut block, &mut input, |block, driver, input| {
        request(driver, input);
        let _ = block.queue_event(0);
    });
    assert_eq!(BASE.metadata().unwrap().blocks(), 0, "the base was written");
    // The disk has 17 blocks, of which the last is incomplete. Later bits must never be set.
    if let [word] = block.owned_blocks() {
        assert_eq!(word >> 17, 0);
    }
});
