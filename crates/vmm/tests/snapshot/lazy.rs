//! Guests whose memory is fetched on demand, and failures of the fetcher at critical moments.
//!
//! A *lazy* restore starts a guest from layers in which chunks of memory are missing. When the
//! guest accesses such a chunk, the VMM requests it from the *fetcher*, the process that copies
//! chunks from a store to the layers.

use super::files::{OpenSnapshot, SnapshotTarget};
use super::guest_image::{guest, skip};
use super::test_fetcher::{FetcherLink, LazyFiles, Mode, TestStore};
use super::test_vm::TestVm;
use jiffy_proto::snapshot::{AfterSnapshot, MemorySource};
use jiffy_proto::vm::{Event, Request, StopCause};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(20);
/// Mode of a store that answers slowly enough for a test to act before all memory is fetched.
const SLOW: Mode = Mode::Answer(Duration::from_millis(3));
/// Number of 64 KiB chunks in the memory whose content the guest checks: 64 MiB.
const CHECKED_CHUNKS: u64 = 1024;

/// Snapshot of a guest with 64 MiB of checked memory, in a store. `dirty 64` fills this memory, and
/// `verify` checks it.
struct Stored {
    store: Arc<TestStore>,
    whole: OpenSnapshot,
    base: File,
}

/// Creates the snapshot. `None` if the test was recorded as skipped.
fn stored(test: &str) -> Option<Stored> {
    let guest = guest(test)?;
    if File::open("/dev/userfaultfd").is_err() {
        skip(test, "/dev/userfaultfd cannot be opened");
        return None;
    }
    let mut vm = TestVm::boot(guest, 2, 256, "");
    assert_eq!(vm.run_command("dirty 64"), "ok");
    vm.verify();
    let whole = vm.snapshot(AfterSnapshot::Stop);
    let store = TestStore::new(&whole);
    let base = vm.base();
    Some(Stored { store, whole, base })
}

impl Stored {
    /// Returns the descriptors for a lazy restore: see [`TestStore::lazy_files`].
    fn files(&self, present: u64, timeout: Duration) -> LazyFiles {
        self.store.lazy_files(present, timeout).unwrap()
    }

    /// Restores the snapshot, and returns when the guest has greeted. Every `present`-th chunk is
    /// cached first, or none if `present` is 0.
    fn restore(&self, present: u64) -> (TestVm, FetcherLink) {
        let files = self.files(present, LIMIT);
        let link = self.store.serve(&files);
        let mut vm = TestVm::start_lazily(self.store.cached.share(), &self.base, &files);
        vm.wait_for_hello();
        (vm, link)
    }

    /// Returns the layers of `snapshot`, a descendant of the stored snapshot, with the complete
    /// layer of the latter.
    fn completed(&self, snapshot: &OpenSnapshot) -> OpenSnapshot {
        let (mut completed, whole) = (snapshot.share(), self.whole.share());
        for (layer, whole) in completed.memory.iter_mut().zip(whole.memory) {
            *layer = whole;
        }
        completed
    }

    /// Returns the number of requests to the store so far.
    fn request_count(&self) -> u64 {
        self.store.request_count.load(Ordering::Relaxed)
    }

    /// Waits until the guest has requested more than `before` chunks.
    fn wait_for_request(&self, before: u64) {
        let limit = Instant::now() + LIMIT;
        while self.request_count() <= before {
            assert!(Instant::now() < limit, "the guest requested no chunk");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_guest_fetches_only_accessed_chunks() {
    let test = "a_guest_fetches_only_accessed_chunks";
    let Some(stored) = stored(test) else { return };
    let (mut vm, _link) = stored.restore(0);
    vm.status();
    let (initial, all) = (stored.request_count(), stored.store.chunks());
    assert!(
        initial < all / 2,
        "{initial} of {all} chunks before the first command"
    );
    vm.verify();
    let request_count = stored.request_count();
    assert!(
        (CHECKED_CHUNKS..=all).contains(&request_count),
        "{request_count} of {all} chunks"
    );
    vm.verify();
    // A second guest maps the chunks in the cache. Its other pages are fetched as well.
    let (mut sibling, _link) = stored.restore(3);
    sibling.verify();
    // Fetched chunks that were not changed are not stored again: the snapshot stores fewer than the
    // 1,024 checked chunks.
    let next = sibling.snapshot(AfterSnapshot::Stop);
    assert!(next.report.stored < 700, "{:?}", next.report);
}

#[test]
fn snapshots_include_missing_memory_and_memory_fetched_meanwhile() {
    let test = "snapshots_include_missing_memory_and_memory_fetched_meanwhile";
    let Some(stored) = stored(test) else { return };
    stored.store.set_mode(SLOW);
    let (mut vm, _link) = stored.restore(2);
    let mut snapshots = Vec::new();
    for _ in 0..4 {
        // The guest checks its memory during the snapshot, and therefore waits for it.
        let check = vm.start_command("verify");
        stored.wait_for_request(stored.request_count());
        snapshots.push(vm.snapshot(AfterSnapshot::Resume));
        drop(check);
    }
    let stays = vm.snapshot(AfterSnapshot::Stay);
    vm.resume();
    snapshots.push(stays);
    stored.store.set_mode(Mode::Answer(Duration::ZERO));
    for snapshot in &snapshots {
        // The checked memory of 1,024 chunks is not stored again.
        assert!(snapshot.report.stored < 1000, "{:?}", snapshot.report);
        let whole = stored.completed(snapshot);
        TestVm::restore(whole, &stored.base, MemorySource::Map).verify();
    }
    vm.verify();
    // A fork whose lowest layer is incomplete, and whose upper layers are complete.
    let files = stored.files(0, LIMIT);
    let _link = stored.store.serve(&files);
    let last = snapshots.pop().unwrap();
    let mut fork = TestVm::start_lazily(last, &stored.base, &files);
    fork.wait_for_hello();
    fork.verify();
}

#[test]
fn a_guest_that_waits_for_memory_can_be_paused_and_resumed() {
    let test = "a_guest_that_waits_for_memory_can_be_paused_and_resumed";
    let Some(stored) = stored(test) else { return };
    let (mut vm, _link) = stored.restore(0);
    vm.status();
    stored.store.set_mode(SLOW);
    let before = stored.request_count();
    let check = vm.start_command("verify");
    // The guest no longer checks its disk: a device that waits for memory would delay a pause up to
    // the timeout.
    stored.wait_for_request(before + 300);
    stored.store.set_mode(Mode::Silent);
    stored.wait_for_request(stored.request_count());
    // vCPUs leave the guest although no chunk is fetched.
    for _ in 0..5 {
        // In microseconds.
        assert!(vm.pause() < 1_000_000);
        vm.resume();
    }
    vm.pause();
    let target = SnapshotTarget::new();
    let snapshot = vm.snapshot_to(target, AfterSnapshot::Stay).unwrap();
    vm.resume();
    // The VMM process cannot be rolled back: another process must replace it.
    let refused = vm.roll_back(&stored.whole).unwrap_err();
    assert!(refused.contains("fetched on demand"), "{refused}");
    stored.store.set_mode(Mode::Answer(Duration::ZERO));
    assert!(answer(check).starts_with("verified"));
    vm.verify();
    let whole = stored.completed(&snapshot);
    TestVm::restore(whole, &stored.base, MemorySource::Map).verify();
}

#[test]
fn memory_returned_before_it_was_fetched_is_harmless() {
    let test = "memory_returned_before_it_was_fetched_is_harmless";
    let Some(stored) = stored(test) else { return };
    stored.store.set_mode(SLOW);
    let (mut vm, _link) = stored.restore(0);
    for target_mib in [96, 0] {
        vm.send(&Request::Balloon { target_mib });
        vm.verify();
    }
    // 64 MiB of incomplete memory are freed, and other memory is used.
    assert_eq!(vm.run_command("dirty 0"), "ok");
    assert_eq!(vm.run_command("dirty 96"), "ok");
    vm.verify();
    let snapshot = vm.snapshot(AfterSnapshot::Resume);
    vm.verify();
    let whole = stored.completed(&snapshot);
    TestVm::restore(whole, &stored.base, MemorySource::Map).verify();
}

/// Waits for the answer to a command.
fn answer(command: UnixStream) -> String {
    let mut line = String::new();
    BufReader::new(command).read_line(&mut line).unwrap();
    line
}

/// Returns the reason why a VM ended, and the time until then.
fn end_of(vm: &mut TestVm) -> (String, Duration) {
    let began = Instant::now();
    let reason = vm.wait(|event| match event {
        Event::Stopped(StopCause::MissingMemory { reason }) => Ok(reason),
        other => Err(other),
    });
    assert!(vm.child.wait().unwrap().success());
    (reason, began.elapsed())
}

#[test]
fn a_guest_with_an_unresponsive_store_is_terminated_and_can_be_restored() {
    let test = "a_guest_with_an_unresponsive_store_is_terminated_and_can_be_restored";
    let Some(stored) = stored(test) else { return };
    let second = Duration::from_secs(1);
    // No chunk is fetched: the event loop waits for a device's rings before the guest runs.
    for (mode, expected) in [
        (Mode::Silent, "the store did not answer for 1 s"),
        (Mode::Fail, "the store did not answer for 1 s (503)"),
    ] {
        stored.store.set_mode(mode);
        let files = stored.files(0, second);
        let _link = stored.store.serve(&files);
        let mut vm = TestVm::start_lazily(stored.store.cached.share(), &stored.base, &files);
        let (reason, took) = end_of(&mut vm);
        assert_eq!(reason, expected);
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
    // The store disconnects while the guest runs.
    stored.store.set_mode(Mode::Answer(Duration::ZERO));
    let files = stored.files(0, second);
    let link = stored.store.serve(&files);
    let mut vm = TestVm::start_lazily(stored.store.cached.share(), &stored.base, &files);
    vm.wait_for_hello();
    link.cut();
    let check = vm.start_command("verify");
    assert_eq!(end_of(&mut vm).0, "the store did not answer for 1 s");
    drop(check);
    let (mut again, _link) = stored.restore(0);
    again.verify();
}

#[test]
fn the_next_fetcher_continues_and_a_waiting_guest_can_be_killed() {
    let test = "the_next_fetcher_continues_and_a_waiting_guest_can_be_killed";
    let Some(stored) = stored(test) else { return };
    let files = stored.files(0, LIMIT);
    let mut link = stored.store.serve(&files);
    let mut vm = TestVm::start_lazily(stored.store.cached.share(), &stored.base, &files);
    vm.wait_for_hello();
    let check = vm.start_command("verify");
    for _ in 0..5 {
        stored.wait_for_request(stored.request_count());
        link.cut();
        link = stored.store.serve(&files);
    }
    assert!(answer(check).starts_with("verified"));
    vm.verify();

    let (mut vm, link) = stored.restore(0);
    stored.store.set_mode(Mode::Silent);
    let before = stored.request_count();
    let _check = vm.start_command("verify");
    stored.wait_for_request(before);
    let began = Instant::now();
    vm.child.kill().unwrap();
    vm.child.wait().unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    drop(link);
    stored.store.set_mode(Mode::Fail);
}
