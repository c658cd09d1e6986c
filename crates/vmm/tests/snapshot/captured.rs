//! Captured snapshots: they are completed even without a controller or after the guest has ended.
//!
//! A *captured* snapshot is acknowledged before its files are written. A *controller* is the
//! process that drives a VMM through its control socket. `mark WORD` stores a word in memory and on
//! the disk of the test guest, and `marks` returns both.

use super::files::SnapshotTarget;
use super::guest_image::guest;
use super::test_vm::{SNAPSHOT_ID, TestVm};
use jiffy_proto::snapshot::{AfterSnapshot, SnapshotDecision};
use jiffy_proto::vm::{Event, Request, StopCause};

/// Returns a VM with 128 MiB of changed memory and one change on its disk.
fn changed(test: &str) -> Option<TestVm> {
    let mut vm = TestVm::boot(guest(test)?, 2, 512, "");
    assert_eq!(vm.run_command("dirty 128"), "ok");
    assert_eq!(vm.run_command("mark one"), "ok");
    Some(vm)
}

#[test]
fn a_captured_snapshot_is_completed_for_the_next_controller() {
    let test = "a_captured_snapshot_is_completed_for_the_next_controller";
    let Some(mut vm) = changed(test) else { return };
    let place = tempfile::tempdir().unwrap();
    vm.detach(&place.path().join("s"));
    let target = SnapshotTarget::new();
    vm.capture(&target);
    vm.disconnect();
    let (running, prepared) = vm.adopt(&place.path().join("s"));
    assert!(running);
    let captured = vm.captured.take().unwrap();
    assert_eq!(captured.id, SNAPSHOT_ID);
    // The snapshot may have been completed before the next controller connected.
    assert_eq!(prepared.is_some(), captured.report.is_some());
    let report = match captured.report {
        Some(report) => report,
        None => vm.outcome().unwrap(),
    };
    // A MiB has 16 chunks.
    assert!(report.stored >= 128 * 16, "{report:?}");
    vm.commit_or_abort(SnapshotDecision::Commit);
    assert_eq!(vm.captured, None);
    vm.adopt_snapshot(target);
    assert_eq!(vm.run_command("mark two"), "ok");
    vm.verify();
    vm.assert_restores(vm.origin.share(), "one one");
    let next = vm.snapshot(AfterSnapshot::Resume);
    vm.assert_restores(next, "two two");
}

#[test]
fn an_unacknowledged_captured_snapshot_is_aborted() {
    let test = "an_unacknowledged_captured_snapshot_is_aborted";
    let Some(mut vm) = changed(test) else { return };
    vm.capture(&SnapshotTarget::new());
    vm.send(&Request::AbortCapture);
    if vm.outcome().is_ok() {
        vm.commit_or_abort(SnapshotDecision::Abort);
    }
    vm.assert_no_snapshot_left();
}

#[test]
fn a_captured_snapshot_is_completed_after_its_guest_was_terminated() {
    let test = "a_captured_snapshot_is_completed_after_its_guest_was_terminated";
    let Some(mut vm) = changed(test) else { return };
    let target = SnapshotTarget::new();
    vm.capture(&target);
    vm.send(&Request::Stop);
    let (mut stopped, mut complete) = (0, false);
    while !(stopped > 0 && complete) {
        match vm.event().0 {
            Event::Stopped(StopCause::Requested) => stopped += 1,
            Event::Snapshotted(_) => complete = true,
            other => panic!("{other:?}"),
        }
    }
    assert!(vm.child.wait().unwrap().success());
    let mut snapshot = vm.origin.share();
    snapshot.state = Some(target.state);
    snapshot.memory.push((target.memory, target.index));
    let frozen = vm.overlay.try_clone().unwrap();
    snapshot.disk.push((frozen, target.disk_index));
    vm.assert_restores(snapshot, "one one");
}
