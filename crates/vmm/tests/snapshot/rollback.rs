//! Rollback of a running VM in place. `mark WORD` stores a word in memory and on the disk of the
//! test guest, and `marks` returns both. `dirty MIB` writes this amount of memory.

use super::files::{FdList, OpenSnapshot, file};
use super::guest_image::guest;
use super::test_vm::{GREETINGS, LAST_RECORD, TestVm};
use jiffy_proto::snapshot::{
    AfterSnapshot, DiskRollback, LaterPages, MemorySource, PopulateMoment, RollbackConfig,
    RollbackReport,
};
use jiffy_proto::vm::{Event, Request};
use std::fs::{self, File};
use std::time::{Duration, Instant};

impl TestVm {
    /// Rolls the guest back to a snapshot whose memory is mapped. Returns when the guest has
    /// greeted.
    pub fn roll_back(&mut self, to: &OpenSnapshot) -> Result<RollbackReport, String> {
        self.roll_back_from(to, MemorySource::Map)
    }

    /// Rolls the guest back. Returns when the guest has greeted.
    pub fn roll_back_from(
        &mut self,
        to: &OpenSnapshot,
        source: MemorySource,
    ) -> Result<RollbackReport, String> {
        self.roll_back_populating(to, source, None)
    }

    /// Rolls the guest back with pages that are copied at its first connection. Returns when the
    /// guest has greeted.
    pub fn roll_back_populating(
        &mut self,
        to: &OpenSnapshot,
        source: MemorySource,
        pages: Option<&File>,
    ) -> Result<RollbackReport, String> {
        let pagemap = File::open(format!("/proc/{}/pagemap", self.child.id())).unwrap();
        let overlay = file();
        let mut fds = FdList(Vec::new());
        let config = RollbackConfig {
            state: fds.add(to.state.as_ref().unwrap()),
            memory: fds.layers(&to.memory),
            source,
            populate: None,
            populate_later: pages.map(|pages| LaterPages {
                pages: fds.add(pages),
                from: PopulateMoment::Connection,
            }),
            pagemap: fds.add(&pagemap),
            disks: vec![DiskRollback {
                layers: fds.layers(&to.disk),
                overlay: fds.add(&overlay),
            }],
        };
        let request = Request::Rollback(Box::new(config));
        self.channel.send(&request, &fds.0).unwrap();
        drop(fds);
        let refused = self.wait(|event| match event {
            Event::RollbackBegun => Ok(None),
            Event::RollbackRefused { reason } => Ok(Some(reason)),
            other => Err(other),
        });
        if let Some(reason) = refused {
            return Err(reason);
        }
        self.greeting = None;
        let report = self.wait(|event| match event {
            Event::RolledBack(report) => Ok(report),
            other => Err(other),
        });
        self.origin = to.share();
        self.overlay = overlay;
        self.wait_for_hello();
        Ok(report)
    }

    /// Requests the guest to return memory, which it may do later.
    pub fn balloon(&self, target_mib: u32) {
        self.send(&Request::Balloon { target_mib });
    }
}

/// Returns the sequence number of the last record that the guest has written.
fn sequence(vm: &mut TestVm) -> u64 {
    vm.status()[LAST_RECORD]
}

/// Returns the VMM's number of descriptors, number of mappings, and private memory in KiB.
pub fn resource_usage(vm: &TestVm) -> (usize, usize, u64) {
    let process = format!("/proc/{}", vm.child.id());
    let fds = fs::read_dir(format!("{process}/fd")).unwrap().count();
    let maps = fs::read_to_string(format!("{process}/maps")).unwrap();
    let status = fs::read_to_string(format!("{process}/status")).unwrap();
    let anonymous = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    let kib = anonymous.unwrap().trim().trim_end_matches(" kB");
    (fds, maps.lines().count(), kib.parse().unwrap())
}

#[test]
fn a_guest_can_be_rolled_back_to_any_snapshot() {
    let test = "a_guest_can_be_rolled_back_to_any_snapshot";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "");
    assert_eq!(vm.run_command("dirty 48"), "ok");
    assert_eq!(vm.run_command("mark one"), "ok");
    let one = vm.snapshot(AfterSnapshot::Resume);
    let then = sequence(&mut vm);
    assert_eq!(vm.run_command("dirty 16"), "ok");
    assert_eq!(vm.run_command("mark two"), "ok");
    let two = vm.snapshot(AfterSnapshot::Resume);
    assert_eq!(vm.run_command("mark three"), "ok");
    let limit = Instant::now() + Duration::from_secs(20);
    // The guest writes 500 records after the snapshot. After the rollback it has written fewer.
    while sequence(&mut vm) < then + 500 {
        assert!(Instant::now() < limit);
    }

    let report = vm.roll_back(&one).unwrap();
    assert!(report.pages > 0, "{report:?}");
    assert!(
        sequence(&mut vm) < then + 400,
        "the guest was not rolled back"
    );
    assert_eq!(vm.run_command("marks"), "one one");
    vm.verify();
    // Roll back to a later snapshot, and to its descendant.
    vm.roll_back(&two).unwrap();
    assert_eq!(vm.run_command("marks"), "two two");
    vm.verify();
    assert_eq!(vm.run_command("mark four"), "ok");
    let four = vm.snapshot(AfterSnapshot::Resume);
    assert_eq!(four.memory.len(), 3);
    vm.roll_back(&one).unwrap();
    assert_eq!(vm.run_command("marks"), "one one");
    vm.roll_back(&four).unwrap();
    assert_eq!(vm.run_command("marks"), "four four");
    vm.verify();
    let mut restored = TestVm::restore(four, &vm.base(), MemorySource::Map);
    assert_eq!(restored.run_command("marks"), "four four");
    restored.verify();
}

#[test]
fn rollbacks_leak_no_resources() {
    let test = "rollbacks_leak_no_resources";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "");
    assert_eq!(vm.run_command("mark start"), "ok");
    let start = vm.snapshot(AfterSnapshot::Resume);
    assert_eq!(vm.run_command("mark later"), "ok");
    let later = vm.snapshot(AfterSnapshot::Resume);
    let base = vm.base();
    drop(vm);
    let mut vm = TestVm::restore(start.share(), &base, MemorySource::Map);
    let mut first = None;
    // A longer test sets the number of rollbacks.
    let rounds = std::env::var("JIFFY_VMM_ROLLBACKS");
    for round in 0..rounds.map_or(20, |rounds| rounds.parse().unwrap()) {
        let (snapshot, marks) = match round % 3 {
            2 => (&later, "later later"),
            _ => (&start, "start start"),
        };
        assert_eq!(vm.run_command(&format!("dirty {}", round % 7 * 8)), "ok");
        // Balloons and free page reports leave holes.
        if round % 5 == 0 {
            vm.balloon(32);
        }
        vm.roll_back(snapshot).unwrap();
        assert_eq!(vm.run_command("marks"), marks);
        if round % 10 == 9 {
            vm.verify();
        }
        if round == 9 {
            vm.roll_back(&start).unwrap();
            assert_eq!(vm.run_command("marks"), "start start");
            first = Some(resource_usage(&vm));
        }
    }
    vm.roll_back(&start).unwrap();
    assert_eq!(vm.run_command("marks"), "start start");
    let (before, after) = (first.unwrap(), resource_usage(&vm));
    // A connection may be closing. Mappings and memory vary, but do not grow with each rollback.
    assert!(
        after.0 <= before.0 + 2,
        "descriptors: {before:?}, {after:?}"
    );
    assert!(after.1 <= before.1 + 16, "mappings: {before:?}, {after:?}");
    assert!(
        after.2 <= before.2 + 16_384,
        "memory: {before:?}, {after:?}"
    );
    vm.verify();
}

#[test]
fn a_vm_whose_memory_was_read_can_be_rolled_back() {
    let test = "a_vm_whose_memory_was_read_can_be_rolled_back";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 1, 256, "");
    assert_eq!(vm.run_command("dirty 16"), "ok");
    assert_eq!(vm.run_command("mark one"), "ok");
    let one = vm.snapshot(AfterSnapshot::Stay);
    let base = vm.base();
    drop(vm);
    let read = MemorySource::Copy { working_set: None };
    let mut vm = TestVm::restore(one.share(), &base, read);
    for source in [read, MemorySource::Map, read] {
        assert_eq!(vm.run_command("mark two"), "ok");
        assert_eq!(vm.run_command("dirty 32"), "ok");
        vm.roll_back_from(&one, source).unwrap();
        assert_eq!(vm.run_command("marks"), "one one");
        vm.verify();
    }
}

#[test]
fn a_rollback_to_an_unsuitable_snapshot_is_rejected() {
    let test = "a_rollback_to_an_unsuitable_snapshot_is_rejected";
    let Some(guest) = guest(test) else { return };
    let mut vm = TestVm::boot(guest, 2, 256, "");
    let own = vm.snapshot(AfterSnapshot::Resume);
    assert_eq!(vm.run_command("mark kept"), "ok");
    let larger = TestVm::boot(guest, 2, 320, "").snapshot(AfterSnapshot::Stay);
    let fewer = TestVm::boot(guest, 1, 256, "").snapshot(AfterSnapshot::Stay);
    let damaged = OpenSnapshot {
        state: Some(file()),
        ..own.share()
    };
    let mut short = own.share();
    short.memory[0].0 = file();
    let mut short_disk = own.share();
    short_disk.disk[0].0 = file();
    for wrong in [larger, fewer, damaged, short, short_disk] {
        let greetings = vm.status()[GREETINGS];
        vm.roll_back(&wrong).unwrap_err();
        assert_eq!(vm.run_command("marks"), "kept kept");
        assert_eq!(vm.status()[GREETINGS], greetings, "its connections broke");
        vm.verify();
    }
    // This snapshot was taken before the guest had any marks.
    vm.roll_back(&own).unwrap();
    assert_eq!(vm.run_command("marks"), "none");
    vm.verify();
}
