//! A restored guest goes on as if nothing had happened.

use super::guest::guest;
use super::vm::Vm;
use jiffy_proto::snapshot::{AfterSnapshot, MemorySource};

const COPY: MemorySource = MemorySource::Copy { working_set: None };

fn goes_on(test: &str, vcpus: u8) {
    let Some(guest) = guest(test) else { return };
    let mut vm = Vm::boot(guest, vcpus, 256, "");
    vm.verify();
    let before = vm.status();
    let snapshot = vm.snapshot(AfterSnapshot::Stop);
    let base = vm.base();
    drop(vm);
    for source in [MemorySource::Map, COPY] {
        let mut restored = Vm::restore(snapshot.share(), &base, source);
        let after = restored.status();
        assert!(
            after[1] >= before[1] && after[4] > before[4],
            "{before:?} {after:?}"
        );
        restored.verify();
    }
}

#[test]
fn a_guest_with_one_vcpu_goes_on_in_the_middle_of_its_computation() {
    goes_on(
        "a_guest_with_one_vcpu_goes_on_in_the_middle_of_its_computation",
        1,
    );
}

#[test]
fn a_guest_with_two_vcpus_goes_on_in_the_middle_of_its_computation() {
    goes_on(
        "a_guest_with_two_vcpus_goes_on_in_the_middle_of_its_computation",
        2,
    );
}

#[test]
fn an_idle_guest_wakes_up_when_it_is_restored() {
    let test = "an_idle_guest_wakes_up_when_it_is_restored";
    let Some(guest) = guest(test) else { return };
    let mut vm = Vm::boot(guest, 2, 256, "quiet_guest");
    vm.ask("marks");
    std::thread::sleep(std::time::Duration::from_secs(2));
    let snapshot = vm.snapshot(AfterSnapshot::Stop);
    let base = vm.base();
    drop(vm);
    for source in [MemorySource::Map, COPY] {
        let mut restored = Vm::restore(snapshot.share(), &base, source);
        restored.ask("marks");
    }
}
