//! Restored guests continue without noticing the restore.
//!
//! The test guest writes numbered *records* to its disk all the time. It *greets* its controller
//! over a new connection after the start and after each restore. `status` returns both numbers.
//!
//! The word `quiet_guest` on the kernel's command line lets the guest write nothing unless a
//! command requests it. The tests send the command `marks` only to receive an answer.

use super::guest_image::guest;
use super::test_vm::{GREETINGS, LAST_RECORD, TestVm};
use jiffy_proto::snapshot::{AfterSnapshot, MemorySource};
use jiffy_proto::vm::{Event, Request};
use std::io::Read;
use std::time::{Duration, Instant};

const COPY_ALL: MemorySource = MemorySource::Copy { working_set: None };

/// Restores a guest with `vcpus` processors from mapped and from copied memory.
fn check_restore(test: &str, vcpus: u8) {
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, vcpus, 256, "");
    vm.verify();
    let before = vm.status();
    let snapshot = vm.snapshot(AfterSnapshot::Stop);
    let base = vm.base();
    drop(vm);
    for source in [MemorySource::Map, COPY_ALL] {
        let mut restored = TestVm::restore(snapshot.share(), &base, source);
        let after = restored.status();
        assert!(
            after[LAST_RECORD] >= before[LAST_RECORD] && after[GREETINGS] > before[GREETINGS],
            "{before:?} {after:?}"
        );
        restored.verify();
    }
}

#[test]
fn a_restored_guest_with_one_vcpu_continues_its_computation() {
    check_restore(
        "a_restored_guest_with_one_vcpu_continues_its_computation",
        1,
    );
}

#[test]
fn a_restored_guest_with_two_vcpus_continues_its_computation() {
    check_restore(
        "a_restored_guest_with_two_vcpus_continues_its_computation",
        2,
    );
}

#[test]
fn a_restored_guest_with_three_vcpus_continues_its_computation() {
    check_restore(
        "a_restored_guest_with_three_vcpus_continues_its_computation",
        3,
    );
}

#[test]
fn a_restored_idle_guest_responds() {
    let test = "a_restored_idle_guest_responds";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "quiet_guest");
    vm.run_command("marks");
    std::thread::sleep(std::time::Duration::from_secs(2));
    let snapshot = vm.snapshot(AfterSnapshot::Stop);
    let base = vm.base();
    drop(vm);
    for source in [MemorySource::Map, COPY_ALL] {
        let mut restored = TestVm::restore(snapshot.share(), &base, source);
        restored.run_command("marks");
    }
}

#[test]
fn a_vm_can_be_stopped_at_any_time_during_its_start() {
    let test = "a_vm_can_be_stopped_at_any_time_during_its_start";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "quiet_guest");
    let snapshot = vm.snapshot(AfterSnapshot::Stop);
    let base = vm.base();
    drop(vm);
    for round in 0..40 {
        let mut vm = TestVm::start_from(snapshot.share(), &base, MemorySource::Map);
        // From before the start of the vCPUs until after it.
        std::thread::sleep(Duration::from_micros(round / 2 * 500));
        match round % 2 {
            0 => vm.send(&Request::Stop),
            _ => vm.disconnect(),
        }
        let limit = Instant::now() + Duration::from_secs(30);
        while vm.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < limit, "round {round}: the VM still runs");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn streams_to_a_guest_are_closed_before_its_stop_is_reported() {
    let test = "streams_to_a_guest_are_closed_before_its_stop_is_reported";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 1, 256, "quiet_guest");
    let mut streams: Vec<_> = (0..8).map(|_| vm.connect()).collect();
    // The answer arrives when the guest has the streams.
    vm.run_command("marks");
    vm.send(&Request::Stop);
    vm.wait(|event| match event {
        Event::Stopped(_) => Ok(()),
        other => Err(other),
    });
    for stream in &mut streams {
        stream.set_nonblocking(true).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
}

/// Writes the golden state of the current format. Run once per format.
#[test]
#[ignore = "writes test data"]
fn make_golden_state() {
    use std::os::unix::fs::FileExt;
    let Some(guest) = guest("make_golden_state") else {
        return;
    };
    let snapshot = TestVm::boot(guest, 2, 128, "").snapshot(AfterSnapshot::Stop);
    let state = snapshot.state.unwrap();
    let mut bytes = vec![0; usize::try_from(state.metadata().unwrap().len()).unwrap()];
    state.read_exact_at(&mut bytes, 0).unwrap();
    let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    std::fs::create_dir_all(&data).unwrap();
    std::fs::write(data.join("state-format1.bin"), bytes).unwrap();
}
