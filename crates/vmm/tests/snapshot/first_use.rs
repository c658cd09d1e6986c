//! Pages that a restored guest writes at its first use.
//!
//! The *first use* of a guest is the first request or command of a user. The VMM assumes that it
//! starts with the first connection to the guest.
//!
//! A VMM maps the memory of its guest from the files of the snapshot. A page becomes *private* when
//! it is copied into the memory of the VMM process. To *populate* pages is to copy them before the
//! guest writes to them.
//!
//! The word `quiet_guest` on the kernel's command line lets the guest write nothing unless a
//! command requests it. The command `dirty MIB` writes this amount of memory. `mark WORD` stores a
//! word in memory and on the disk, and `marks` returns both.

use super::files::file;
use super::guest_image::guest;
use super::rollback::resource_usage;
use super::test_vm::TestVm;
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, MEMORY_PAGE};
use jiffy_proto::snapshot::{AfterSnapshot, MemorySource, PopulateMoment};
use jiffy_proto::vm::{Event, Request};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::time::{Duration, Instant};

const MEMORY_MIB: u32 = 256;
/// Memory that the guest has written, in MiB, and minimum private memory of its VMM after these
/// pages were copied, in KiB.
const WRITTEN_MIB: u64 = 48;
const COPIED_KIB: u64 = 40 << 10;
const LIMIT: Duration = Duration::from_secs(20);

/// Returns the index of the pages of all chunks in `layer`.
fn pages_of(layer: &File) -> File {
    let (mut layer, mut bytes) = (layer.try_clone().unwrap(), Vec::new());
    layer.rewind().unwrap();
    layer.read_to_end(&mut bytes).unwrap();
    let chunks = LayerIndex::decode_any(&bytes).unwrap().stored;
    let each = u64::from(MEMORY_CHUNK / MEMORY_PAGE);
    let mut index = LayerIndex::empty(MEMORY_PAGE, u64::from(MEMORY_MIB) << 20);
    for chunk in chunks.iter() {
        index.stored.insert_range(chunk * each..(chunk + 1) * each);
    }
    let mut pages = file();
    pages.write_all(&index.encode()).unwrap();
    pages
}

/// Returns the private memory of a VMM, in KiB.
fn private_kib(vm: &TestVm) -> u64 {
    resource_usage(vm).2
}

/// Waits until the event loop has run.
fn wait_for_event_loop(vm: &mut TestVm) {
    vm.send(&Request::Stats);
    vm.wait(|event| match event {
        Event::Stats(_) => Ok(()),
        other => Err(other),
    });
}

/// Waits until the VMM has copied the pages.
fn wait_until_copied(vm: &TestVm) {
    let limit = Instant::now() + LIMIT;
    while private_kib(vm) < COPIED_KIB {
        assert!(Instant::now() < limit, "{} KiB", private_kib(vm));
        std::thread::yield_now();
    }
}

#[test]
fn pages_of_a_first_use_are_copied_once_the_guest_is_used() {
    let test = "pages_of_a_first_use_are_copied_once_the_guest_is_used";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, MEMORY_MIB, "quiet_guest");
    assert_eq!(vm.run_command(&format!("dirty {WRITTEN_MIB}")), "ok");
    assert_eq!(vm.run_command("mark one"), "ok");
    let snapshot = vm.snapshot(AfterSnapshot::Stop);
    let base = vm.base();
    drop(vm);
    let pages = pages_of(&snapshot.memory[0].1);
    let restore = |from| TestVm::restore_populating(snapshot.share(), &base, &pages, from);

    let mut restored = restore(PopulateMoment::Connection);
    wait_for_event_loop(&mut restored);
    assert!(
        private_kib(&restored) < COPIED_KIB / 2,
        "{}",
        private_kib(&restored)
    );
    assert_eq!(restored.run_command("marks"), "one one");
    wait_until_copied(&restored);
    restored.verify();
    wait_until_copied(&restore(PopulateMoment::Start));

    // The private pages remain private, and the guest continues with their content.
    assert_eq!(restored.run_command("mark two"), "ok");
    let back = restored.roll_back_populating(&snapshot, MemorySource::Map, Some(&pages));
    // A page has 4 KiB.
    assert!(back.unwrap().pages > COPIED_KIB / 4);
    assert!(private_kib(&restored) >= COPIED_KIB);
    assert_eq!(restored.run_command("marks"), "one one");
    restored.verify();

    // After a rollback from memory without these pages, they are copied at the guest's first use.
    let mut other = TestVm::restore(snapshot.share(), &base, MemorySource::Map);
    let back = other.roll_back_populating(&snapshot, MemorySource::Map, Some(&pages));
    back.unwrap();
    wait_for_event_loop(&mut other);
    assert!(
        private_kib(&other) < COPIED_KIB / 2,
        "{}",
        private_kib(&other)
    );
    assert_eq!(other.run_command("marks"), "one one");
    wait_until_copied(&other);
    // A snapshot contains the changed pages only, not the copies: fewer than half of the written
    // chunks of 64 KiB.
    let next = other.snapshot(AfterSnapshot::Resume);
    assert!(
        next.report.stored < WRITTEN_MIB << 20 >> 17,
        "{:?}",
        next.report
    );
    other.verify();
}
