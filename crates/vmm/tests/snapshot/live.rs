//! Snapshots of running guests.
//!
//! The test guest (`tests/guest/snapshot_init.c`) writes continuously to memory and disk. Its
//! command `mark WORD` stores a word in memory and on the disk, and `marks` returns both words.
//! `dirty MIB` writes this amount of memory. `status` counts the *greetings*: the guest opens a
//! connection to its controller at the start, and again if a restore has closed it. A chunk has
//! 64 KiB.
//!
//! The word `quiet_guest` on the kernel's command line lets the guest write nothing unless a
//! command requests it.

use super::files::{OpenSnapshot, SnapshotTarget, file};
use super::guest_image::guest;
use super::test_vm::{GREETINGS, TestVm};
use jiffy_proto::layer::{LayerIndex, UnitSet};
use jiffy_proto::snapshot::{AfterSnapshot, MemorySource};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::thread;
use std::time::Duration;

/// Maximum number of chunks that a guest changes between two snapshots without `dirty`. A guest of
/// 256 MiB has 4,096 chunks.
const MAX_CHANGED_CHUNKS: u64 = 700;

fn restore(snapshot: &OpenSnapshot, base: &File) -> TestVm {
    TestVm::restore(snapshot.share(), base, MemorySource::Map)
}

#[test]
fn a_live_snapshot_does_not_disturb_its_guest_and_both_verify() {
    let test = "a_live_snapshot_does_not_disturb_its_guest_and_both_verify";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "");
    assert_eq!(vm.run_command("dirty 64"), "ok");
    assert_eq!(vm.run_command("mark before"), "ok");
    let snapshot = vm.snapshot(AfterSnapshot::Resume);
    let report = &snapshot.report;
    // In KiB: the snapshot stores at least the 64 MiB of `dirty`.
    assert!(report.stored * 64 >= 64 * 1024, "{report:?}");
    assert!(report.stopped_us <= report.total_us, "{report:?}");
    assert_eq!(vm.run_command("mark after"), "ok");
    let greetings = vm.status()[GREETINGS];
    let mut restored = restore(&snapshot, &vm.base());
    assert_eq!(restored.run_command("marks"), "before before");
    assert_eq!(vm.run_command("marks"), "after after");
    restored.verify();
    vm.verify();
    assert_eq!(
        vm.status()[GREETINGS],
        greetings,
        "the parent's connections broke"
    );
}

/// Returns the number of page faults of processes for which the VMM has waited.
fn faults_of_children(vm: &TestVm) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", vm.child.id())).unwrap();
    // The fields after the name, which is in parentheses, start with the third field. `cminflt` is
    // the eleventh.
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    fields.split(' ').nth(8).unwrap().parse().unwrap()
}

#[test]
fn a_process_is_forked_only_for_a_snapshot_that_takes_long() {
    let test = "a_process_is_forked_only_for_a_snapshot_that_takes_long";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 1, 256, "quiet_guest");
    for (dirty, is_long) in [("dirty 64", true), ("dirty 1", false), ("dirty 48", true)] {
        assert_eq!(vm.run_command(dirty), "ok");
        assert_eq!(vm.run_command("mark before"), "ok");
        let former = faults_of_children(&vm);
        let snapshot = vm.snapshot(AfterSnapshot::Resume);
        let forked = faults_of_children(&vm) > former;
        // Before Linux 6.7, all private memory may differ. A slow disk ends the time of a write.
        let report = &snapshot.report;
        let may_fork = report.stopped_us > 50_000 || report.candidates > 512;
        assert!(forked || !is_long, "{dirty}: {report:?}");
        assert!(!forked || is_long || may_fork, "{dirty}: {report:?}");
        assert_eq!(vm.run_command("mark after"), "ok");
        let mut restored = restore(&snapshot, &vm.base());
        assert_eq!(restored.run_command("marks"), "before before");
        restored.verify();
        vm.verify();
    }
}

#[test]
fn every_snapshot_of_a_busy_writer_restores_to_a_state_that_verifies() {
    let test = "every_snapshot_of_a_busy_writer_restores_to_a_state_that_verifies";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "");
    let mut moment = 7u64;
    for round in 0..10 {
        moment = moment
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(round);
        // A pseudorandom time of at most 16 ms.
        thread::sleep(Duration::from_micros(moment >> 50));
        let snapshot = vm.snapshot(AfterSnapshot::Resume);
        restore(&snapshot, &vm.base()).verify();
    }
    vm.verify();
}

#[test]
fn twenty_generations_of_snapshots_preserve_all_data() {
    let test = "twenty_generations_of_snapshots_preserve_all_data";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "");
    for generation in 0..20 {
        assert_eq!(
            vm.run_command(&format!("mark generation{generation}")),
            "ok"
        );
        let snapshot = vm.snapshot(AfterSnapshot::Stop);
        let base = vm.base();
        vm = restore(&snapshot, &base);
        let mark = format!("generation{generation} generation{generation}");
        assert_eq!(vm.run_command("marks"), mark);
        vm.verify();
        if generation > 0 {
            // Only the changes of one generation are stored.
            assert!(
                snapshot.report.stored < MAX_CHANGED_CHUNKS,
                "{:?}",
                snapshot.report
            );
        }
    }
}

#[test]
fn siblings_do_not_see_each_others_writes() {
    let test = "siblings_do_not_see_each_others_writes";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 1, 256, "");
    assert_eq!(vm.run_command("mark parent"), "ok");
    let snapshot = vm.snapshot(AfterSnapshot::Stay);
    let base = vm.base();
    vm.resume();
    let mut siblings: Vec<TestVm> = (0..4).map(|_| restore(&snapshot, &base)).collect();
    for (number, sibling) in siblings.iter_mut().enumerate() {
        assert_eq!(sibling.run_command("marks"), "parent parent");
        assert_eq!(sibling.run_command(&format!("mark child{number}")), "ok");
    }
    for (number, sibling) in siblings.iter_mut().enumerate() {
        assert_eq!(
            sibling.run_command("marks"),
            format!("child{number} child{number}")
        );
        sibling.verify();
    }
    assert_eq!(vm.run_command("marks"), "parent parent");
    vm.verify();
}

#[test]
fn memory_that_became_zero_takes_no_space() {
    let test = "memory_that_became_zero_takes_no_space";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 1, 256, "quiet_guest init_on_free=1");
    assert_eq!(vm.run_command("dirty 96"), "ok");
    let full = vm.snapshot(AfterSnapshot::Resume);
    assert_eq!(vm.run_command("dirty 0"), "ok");
    let freed = vm.snapshot(AfterSnapshot::Resume);
    // Most of the 1,536 chunks of `dirty 96` are zero now. The others contain a page that the
    // guest's kernel uses again.
    assert!(freed.report.zero > 1000, "{:?}", freed.report);
    let (layer, _) = freed.memory.last().unwrap();
    let stored = layer.metadata().unwrap().blocks() * 512;
    // One additional chunk for the metadata of the file system.
    assert!(stored <= (freed.report.stored + 1) * 65536, "{stored}");
    assert!(full.report.stored > 1500, "{:?}", full.report);
    restore(&freed, &vm.base()).run_command("verify");
}

#[test]
fn a_large_layer_is_written_by_two_processes_and_compared_by_hash() {
    let test = "a_large_layer_is_written_by_two_processes_and_compared_by_hash";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "");
    // 96 MiB are 1,536 chunks: two processes write a layer from 1,024 candidates on, and hashes of
    // chunks are recorded from 64 MiB on. Later snapshots compare memory with these hashes.
    assert_eq!(vm.run_command("dirty 96"), "ok");
    let first = vm.snapshot(AfterSnapshot::Resume);
    assert!(first.report.stored > 1500, "{:?}", first.report);
    let second = vm.snapshot(AfterSnapshot::Resume);
    // Guest memory mainly consists of huge pages, whose writes are not tracked. All chunks are
    // therefore compared, although few have changed.
    assert!(second.report.candidates > 1500, "{:?}", second.report);
    assert!(
        second.report.stored < MAX_CHANGED_CHUNKS,
        "{:?}",
        second.report
    );
    let third = vm.snapshot(AfterSnapshot::Stay);
    assert!(
        third.report.stored < MAX_CHANGED_CHUNKS,
        "{:?}",
        third.report
    );
    for snapshot in [first, second, third] {
        restore(&snapshot, &vm.base()).verify();
    }
    vm.resume();
    vm.verify();
}

#[test]
fn a_guest_can_be_paused_and_resumed_repeatedly() {
    let test = "a_guest_can_be_paused_and_resumed_repeatedly";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "");
    for _ in 0..20 {
        vm.pause();
        vm.resume();
    }
    let stopped = vm.pause();
    assert!(stopped < 1_000_000, "{stopped} us");
    vm.resume();
    vm.verify();
}

#[test]
fn a_guest_restored_from_its_working_set_verifies() {
    let test = "a_guest_restored_from_its_working_set_verifies";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "");
    assert_eq!(vm.run_command("dirty 64"), "ok");
    let snapshot = vm.snapshot(AfterSnapshot::Stop);
    let mut first = restore(&snapshot, &vm.base());
    first.status();
    let (set, chunks) = first.working_set();
    // The guest touches fewer than half of its 4,096 chunks.
    assert!(chunks < 2000, "{chunks} chunks touched");
    let mut second = TestVm::restore_with(snapshot.share(), &vm.base(), &set);
    second.verify();
    // Chunks that were read into memory and not changed are not stored again.
    let next = second.snapshot(AfterSnapshot::Stop);
    assert!(next.report.stored < MAX_CHANGED_CHUNKS, "{:?}", next.report);
}

/// Returns the stored units of an index file.
fn stored(index: &File) -> UnitSet {
    let mut bytes = vec![0; usize::try_from(index.metadata().unwrap().len()).unwrap()];
    index.read_exact_at(&mut bytes, 0).unwrap();
    LayerIndex::decode_any(&bytes).unwrap().stored
}

#[test]
fn a_pause_records_the_chunks_that_the_guest_touched_since_its_restore() {
    let test = "a_pause_records_the_chunks_that_the_guest_touched_since_its_restore";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "");
    assert_eq!(vm.run_command("dirty 64"), "ok");
    let first = vm.snapshot(AfterSnapshot::Stop);
    let mut restored = restore(&first, &vm.base());
    restored.status();
    let (before, _) = restored.working_set();
    let touched = file();
    let mut target = SnapshotTarget::new();
    target.working_set = Some(touched.try_clone().unwrap());
    let second = restored.snapshot_to(target, AfterSnapshot::Stop).unwrap();
    let (before, recorded) = (stored(&before), stored(&touched));
    assert!(before.iter().all(|chunk| recorded.contains(chunk)));
    // The set contains all written chunks, and far fewer than all chunks.
    let written = stored(&second.memory.last().unwrap().1);
    assert!(written.iter().all(|chunk| recorded.contains(chunk)));
    assert!(
        recorded.count() < first.report.stored,
        "{}",
        recorded.count()
    );
}
