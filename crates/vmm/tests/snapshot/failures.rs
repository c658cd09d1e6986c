//! Failing snapshots: the guest continues to run unharmed. `mark WORD` stores a word in memory and
//! on the disk of the test guest, and `marks` returns both. `dirty MIB` writes this amount of
//! memory.

use super::files::{SnapshotTarget, file};
use super::guest_image::{guest, skip};
use super::test_vm::TestVm;
use jiffy_proto::snapshot::{AfterSnapshot, MemorySource};
use jiffy_proto::vm::{Event, StopCause};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// Creates a file on a file system of 8 MiB that has no path. `None` if it cannot be mounted.
fn small_disk() -> Option<File> {
    let place = tempfile::tempdir().unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"])
        .arg(place.path())
        .output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        return None;
    }
    let open = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(place.path().join("f"));
    let umount = Command::new("umount").arg("-l").arg(place.path()).status();
    assert!(umount.unwrap().success());
    Some(open.unwrap())
}

#[test]
fn a_full_disk_fails_the_snapshot_and_the_guest_continues() {
    let test = "a_full_disk_fails_the_snapshot_and_the_guest_continues";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "");
    assert_eq!(vm.run_command("dirty 32"), "ok");
    assert_eq!(vm.run_command("mark one"), "ok");
    for then in [
        AfterSnapshot::Resume,
        AfterSnapshot::Stay,
        AfterSnapshot::Stop,
    ] {
        let Some(memory) = small_disk() else {
            return skip(test, "a small file system cannot be mounted");
        };
        let target = SnapshotTarget::to(memory);
        let error = vm.snapshot_to(target, then).err().unwrap();
        assert!(error.contains("ENOSPC"), "{error}");
        vm.verify();
    }
    // No disk content is lost in the guest or in the next snapshot.
    assert_eq!(vm.run_command("marks"), "one one");
    let snapshot = vm.snapshot(AfterSnapshot::Resume);
    let mut restored = TestVm::restore(snapshot, &vm.base(), MemorySource::Map);
    assert_eq!(restored.run_command("marks"), "one one");
    restored.verify();
    // The guest waits for the write of so little memory.
    assert_eq!(vm.run_command("dirty 10"), "ok");
    let target = SnapshotTarget::to(small_disk().unwrap());
    let error = vm.snapshot_to(target, AfterSnapshot::Resume).err().unwrap();
    assert!(error.contains("ENOSPC"), "{error}");
    assert_eq!(vm.run_command("marks"), "one one");
    vm.snapshot(AfterSnapshot::Resume);
    vm.verify();
}

#[test]
fn a_vmm_killed_in_the_middle_of_a_snapshot_leaves_no_process() {
    let test = "a_vmm_killed_in_the_middle_of_a_snapshot_leaves_no_process";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 1, 512, "");
    assert_eq!(vm.run_command("dirty 256"), "ok");
    vm.request_snapshot(&SnapshotTarget::new(), AfterSnapshot::Resume);
    let pid = vm.child.id();
    let limit = Instant::now() + Duration::from_secs(10);
    let writer = loop {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        if let Some(child) = children.split_whitespace().next() {
            break child.to_owned();
        }
        assert!(Instant::now() < limit, "no process writes memory");
    };
    vm.child.kill().unwrap();
    vm.child.wait().unwrap();
    // The process may be a zombie until its new parent reaps it.
    let alive = || {
        let stat = fs::read_to_string(format!("/proc/{writer}/stat")).unwrap_or_default();
        !stat.is_empty() && !stat.contains(") Z ")
    };
    while alive() {
        assert!(Instant::now() < limit, "process {writer} is still there");
        std::thread::yield_now();
    }
}

#[test]
fn a_second_concurrent_snapshot_is_rejected() {
    let test = "a_second_concurrent_snapshot_is_rejected";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 1, 512, "");
    assert_eq!(vm.run_command("dirty 256"), "ok");
    vm.request_snapshot(&SnapshotTarget::new(), AfterSnapshot::Resume);
    vm.request_snapshot(&SnapshotTarget::new(), AfterSnapshot::Resume);
    let error = vm.outcome().unwrap_err();
    assert!(error.contains("still being written"), "{error}");
    vm.outcome().unwrap();
    vm.verify();
}

#[test]
fn a_damaged_state_is_rejected_with_a_reason() {
    let test = "a_damaged_state_is_rejected_with_a_reason";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 1, 256, "");
    let snapshot = vm.snapshot(AfterSnapshot::Stop);
    let base = vm.base();
    // Asserts that a restore from these bytes as state is rejected with a reason that contains
    // `words`.
    let refuse = |state: &[u8], words: &str| {
        let mut bad = snapshot.share();
        let mut file = file();
        file.write_all(state).unwrap();
        bad.state = Some(file);
        let vm = TestVm::start_from(bad, &base, MemorySource::Map);
        match vm.event().0 {
            Event::Stopped(StopCause::BadConfig { reason }) => {
                assert!(reason.contains(words), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    };
    // A state starts with `JIFFYVMS` and the number of its format.
    refuse(b"", "damaged");
    refuse(b"JIFFYVMS\xff\0\0\0", "has format 255");
    refuse(b"JIFFYVMS\x01\0\0\0\xff\xff\xff", "damaged");
}

#[test]
fn a_snapshot_above_its_size_limit_is_rejected_before_it_is_written() {
    let test = "a_snapshot_above_its_size_limit_is_rejected_before_it_is_written";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 1, 256, "");
    assert_eq!(vm.run_command("dirty 32"), "ok");
    assert_eq!(vm.run_command("mark one"), "ok");
    for then in [AfterSnapshot::Resume, AfterSnapshot::Stay] {
        let target = SnapshotTarget::new();
        let memory = target.memory.try_clone().unwrap();
        vm.max_bytes = Some(8 << 20);
        let error = vm.snapshot_to(target, then).err().unwrap();
        assert!(error.contains("at most 8388608 are allowed"), "{error}");
        assert_eq!(memory.metadata().unwrap().blocks(), 0);
        vm.verify();
    }
    // No changes are lost: the next snapshot is complete and within its limit.
    vm.max_bytes = Some(300 << 20);
    let snapshot = vm.snapshot(AfterSnapshot::Resume);
    let mut restored = TestVm::restore(snapshot, &vm.base(), MemorySource::Map);
    assert_eq!(restored.run_command("marks"), "one one");
    restored.verify();
    vm.verify();
}
