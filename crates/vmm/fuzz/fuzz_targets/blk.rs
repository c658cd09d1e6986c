#![no_main]

use jiffy_vmm::virtio::blk::{Backend, Block};
use jiffy_vmm_fuzz::{Input, run};
use libfuzzer_sys::fuzz_target;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::LazyLock;

/// 16 blocks and one sector of nothing but hole: whoever writes to it makes it take up room.
static BASE: LazyLock<File> = LazyLock::new(|| {
    let file = File::from(memfd_create("base", MFdFlags::empty()).unwrap());
    file.set_len(SIZE).unwrap();
    file
});
const SIZE: u64 = 16 * 4096 + 512;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let kind = input.u8();
    let base = BASE.try_clone().unwrap();
    let backend = if kind & 1 == 0 {
        let overlay = File::from(memfd_create("overlay", MFdFlags::empty()).unwrap());
        Backend::Overlay { base, overlay }
    } else {
        Backend::ReadOnly(base)
    };
    let mut block = Block::new("blk0", backend)
        .unwrap()
        .flush_to_host(kind & 2 == 0);
    run(&mut block, &mut input, |_, _| {});
    assert_eq!(BASE.metadata().unwrap().blocks(), 0, "the base was written");
    // No bit beyond the disk is ever owned.
    if let [word] = block.owned_blocks() {
        assert_eq!(word >> 17, 0);
    }
});
