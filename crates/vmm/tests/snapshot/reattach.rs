//! VMs that outlive their controller, and their state after reattachment.
//!
//! A *controller* is the process that drives a VMM through its control socket. The command
//! `mark WORD` of the test guest stores a word in memory and on the disk, and `marks` returns both.
//! `dirty MIB` writes this amount of memory.
//! A *prepared* snapshot is complete, but neither committed nor aborted.

use super::files::SnapshotTarget;
use super::guest_image::guest;
use super::test_vm::{GREETINGS, SNAPSHOT_ID, TestVm};
use jiffy_proto::snapshot::{AfterSnapshot, SnapshotDecision};

/// Returns a detached VM with changes in memory and on its disk, and the directory of its socket.
fn detached_vm(test: &str) -> Option<(TestVm, tempfile::TempDir)> {
    let guest = guest(test)?;
    let place = tempfile::tempdir().unwrap();
    let mut vm = TestVm::boot(guest, 2, 256, "");
    assert_eq!(vm.run_command("dirty 32"), "ok");
    assert_eq!(vm.run_command("mark one"), "ok");
    vm.detach(&place.path().join("s"));
    Some((vm, place))
}

#[test]
fn a_guest_does_not_notice_that_its_controller_was_replaced() {
    let test = "a_guest_does_not_notice_that_its_controller_was_replaced";
    let Some((mut vm, place)) = detached_vm(test) else {
        return;
    };
    let before = vm.status();
    for _ in 0..2 {
        vm.disconnect();
        assert_eq!(vm.adopt(&place.path().join("s")), (true, None));
        vm.verify();
    }
    assert_eq!(
        vm.status()[GREETINGS],
        before[GREETINGS],
        "the agent greeted again"
    );
    // The overlay that the next controller received contains the guest's writes.
    assert_eq!(vm.run_command("mark two"), "ok");
    let snapshot = vm.snapshot(AfterSnapshot::Resume);
    vm.assert_restores(snapshot, "two two");
}

#[test]
fn a_snapshot_that_its_controller_abandoned_is_aborted() {
    let test = "a_snapshot_that_its_controller_abandoned_is_aborted";
    let Some((mut vm, place)) = detached_vm(test) else {
        return;
    };
    assert_eq!(vm.run_command("dirty 128"), "ok");
    vm.request_snapshot(&SnapshotTarget::new(), AfterSnapshot::Resume);
    vm.disconnect();
    let (running, prepared_snapshot) = vm.adopt(&place.path().join("s"));
    assert!(running);
    // The snapshot may have been completed before its controller disconnected.
    if prepared_snapshot.is_some() {
        vm.commit_or_abort(SnapshotDecision::Abort);
    }
    vm.assert_no_snapshot_left();
}

#[test]
fn a_prepared_snapshot_is_committed_only_by_the_next_controller() {
    let test = "a_prepared_snapshot_is_committed_only_by_the_next_controller";
    for then in [AfterSnapshot::Resume, AfterSnapshot::Stay] {
        for decision in [SnapshotDecision::Commit, SnapshotDecision::Abort] {
            let Some((mut vm, place)) = detached_vm(test) else {
                return;
            };
            // The next snapshot builds on this one, so it must be committed first.
            let first = vm.snapshot(AfterSnapshot::Resume);
            vm.commit_or_abort(SnapshotDecision::Commit);
            assert_eq!(vm.run_command("mark two"), "ok");
            let target = SnapshotTarget::new();
            vm.request_snapshot(&target, then);
            vm.outcome().unwrap();
            vm.disconnect();
            let (running, prepared_snapshot) = vm.adopt(&place.path().join("s"));
            assert_eq!(running, then == AfterSnapshot::Resume);
            assert_eq!(prepared_snapshot.as_deref(), Some(SNAPSHOT_ID));
            vm.commit_or_abort(decision);
            if !running {
                vm.resume();
            }
            // A committed snapshot is a layer below the next snapshot.
            let layers = first.memory.len() + usize::from(bool::from(decision));
            if decision == SnapshotDecision::Commit {
                vm.adopt_snapshot(target);
            }
            assert_eq!(vm.run_command("marks"), "two two");
            vm.verify();
            assert_eq!(vm.run_command("mark three"), "ok");
            let last = vm.snapshot(AfterSnapshot::Resume);
            assert_eq!(last.memory.len(), layers + 1);
            vm.assert_restores(last, "three three");
        }
    }
}
