//! A VM that outlives its controller, and what the next one finds.

use super::guest::guest;
use super::vm::{Target, Vm};
use jiffy_proto::snapshot::{AfterSnapshot, MemorySource};

/// A kept VM with something in memory and on its disk, and the directory of its socket.
fn kept(test: &str) -> Option<(Vm, tempfile::TempDir)> {
    let guest = guest(test)?;
    let place = tempfile::tempdir().unwrap();
    let mut vm = Vm::boot(guest, 2, 256, "");
    assert_eq!(vm.ask("dirty 32"), "ok");
    assert_eq!(vm.ask("mark one"), "ok");
    vm.keep(&place.path().join("s"));
    Some((vm, place))
}

#[test]
fn a_guest_does_not_notice_that_its_controller_was_replaced() {
    let test = "a_guest_does_not_notice_that_its_controller_was_replaced";
    let Some((mut vm, place)) = kept(test) else {
        return;
    };
    let before = vm.status();
    for _ in 0..2 {
        vm.desert();
        assert_eq!(vm.adopt(&place.path().join("s")), (true, None));
        vm.verify();
    }
    assert_eq!(vm.status()[4], before[4], "the agent greeted again");
    // What the next controller was handed is what the guest writes to.
    assert_eq!(vm.ask("mark two"), "ok");
    let snapshot = vm.snapshot(AfterSnapshot::Resume);
    let mut restored = Vm::restore(snapshot, &vm.base(), MemorySource::Map);
    assert_eq!(restored.ask("marks"), "two two");
    restored.verify();
}

#[test]
fn a_snapshot_that_its_controller_left_half_way_did_not_happen() {
    let test = "a_snapshot_that_its_controller_left_half_way_did_not_happen";
    let Some((mut vm, place)) = kept(test) else {
        return;
    };
    assert_eq!(vm.ask("dirty 128"), "ok");
    vm.ask_snapshot(&Target::new(), AfterSnapshot::Resume);
    vm.desert();
    let (running, undecided) = vm.adopt(&place.path().join("s"));
    assert!(running);
    // It may have been faster than the end of its controller.
    if undecided.is_some() {
        vm.settle(false);
    }
    assert_eq!(vm.ask("mark two"), "ok");
    vm.verify();
    let snapshot = vm.snapshot(AfterSnapshot::Resume);
    assert_eq!(snapshot.memory.len(), 1);
    let mut restored = Vm::restore(snapshot, &vm.base(), MemorySource::Map);
    assert_eq!(restored.ask("marks"), "two two");
    restored.verify();
}

#[test]
fn a_complete_snapshot_counts_only_if_the_next_controller_says_so() {
    let test = "a_complete_snapshot_counts_only_if_the_next_controller_says_so";
    for then in [AfterSnapshot::Resume, AfterSnapshot::Stay] {
        for happened in [true, false] {
            let Some((mut vm, place)) = kept(test) else {
                return;
            };
            // Settled at once, like all but the last.
            let first = vm.snapshot(AfterSnapshot::Resume);
            vm.settle(true);
            assert_eq!(vm.ask("mark two"), "ok");
            let target = Target::new();
            vm.ask_snapshot(&target, then);
            vm.outcome().unwrap();
            vm.desert();
            let (running, undecided) = vm.adopt(&place.path().join("s"));
            assert_eq!(running, then == AfterSnapshot::Resume);
            assert_eq!(undecided.as_deref(), Some("next"));
            vm.settle(happened);
            if !running {
                vm.resume();
            }
            let layers = first.memory.len() + usize::from(happened);
            if happened {
                vm.took(target);
            }
            assert_eq!(vm.ask("marks"), "two two");
            vm.verify();
            assert_eq!(vm.ask("mark three"), "ok");
            let last = vm.snapshot(AfterSnapshot::Resume);
            assert_eq!(last.memory.len(), layers + 1);
            let mut restored = Vm::restore(last, &vm.base(), MemorySource::Map);
            assert_eq!(restored.ask("marks"), "three three");
            restored.verify();
        }
    }
}
