//! Tests of the ledger with a clock of their own. The *ledger* contains the usage of each owner on
//! each day.
//!
//! [`UsageLedger::start`] and [`UsageLedger::adopt`] receive the id of a sandbox, its owner and its
//! memory in MiB.

use super::*;
use std::sync::atomic::{AtomicU64, Ordering};

const HOUR_MS: u64 = 3_600_000;

/// Clock whose times and boot the test sets.
#[derive(Default)]
struct FakeClock {
    wall_ms: AtomicU64,
    up_ms: AtomicU64,
    boot: AtomicU64,
}

impl FakeClock {
    fn at_day(day: u64) -> Arc<Self> {
        let clock = Self::default();
        clock.wall_ms.store(day * DAY_MS, Ordering::Relaxed);
        Arc::new(clock)
    }

    fn advance(&self, ms: u64) {
        self.wall_ms.fetch_add(ms, Ordering::Relaxed);
        self.up_ms.fetch_add(ms, Ordering::Relaxed);
    }

    /// Sets the wall clock alone.
    fn step_to(&self, wall_ms: u64) {
        self.wall_ms.store(wall_ms, Ordering::Relaxed);
    }
}

impl UsageClock for FakeClock {
    fn now(&self) -> UsageMoment {
        UsageMoment {
            wall_ms: self.wall_ms.load(Ordering::Relaxed),
            up_ms: self.up_ms.load(Ordering::Relaxed),
        }
    }

    fn boot(&self) -> String {
        format!("boot-{}", self.boot.load(Ordering::Relaxed))
    }
}

/// Ledger in a directory, with its clock.
struct Host {
    directory: tempfile::TempDir,
    clock: Arc<FakeClock>,
    ledger: UsageLedger,
}

impl Host {
    fn at_day(day: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let clock = FakeClock::at_day(day);
        let ledger = open(&directory, &clock);
        Self {
            directory,
            clock,
            ledger,
        }
    }

    /// Opens the ledger again, without a write.
    fn crash(&mut self) {
        self.ledger = open(&self.directory, &self.clock);
    }

    /// Returns days and amounts of an owner.
    fn rows(&self, owner: Option<&str>) -> Vec<(u32, UsageAmounts)> {
        let query = UsageQuery {
            owner: owner.map(str::to_owned),
            to: Day(u32::MAX),
            limit: 10_000,
            ..UsageQuery::default()
        };
        let page = self.ledger.page(&query).unwrap();
        assert!(!page.more);
        let rows = page.rows.into_iter();
        rows.map(|row| (row.day.0, row.amounts)).collect()
    }

    fn total(&self, owner: &str) -> UsageAmounts {
        let mut sum = UsageAmounts::default();
        let rows = self.rows(Some(owner));
        rows.iter().for_each(|(_, amounts)| sum.add(amounts));
        sum
    }
}

fn open(directory: &tempfile::TempDir, clock: &Arc<FakeClock>) -> UsageLedger {
    UsageLedger::open_with(&directory.path().join("usage.db"), clock.clone()).unwrap()
}

/// Returns a measurement of a guest: its CPU time and the bytes that it has sent.
fn reading(cpu_us: u64, sent: u64) -> Option<GuestCounters> {
    Some(GuestCounters {
        cpu_us,
        sent_bytes: Some(sent),
    })
}

#[test]
fn usage_is_counted_by_key_and_day_until_the_stop() {
    let host = Host::at_day(100);
    host.clock.advance(23 * HOUR_MS);
    host.ledger.start("s1", Some("alice"), 1024, reading(5, 7));
    host.ledger.start("s2", None, 512, None);
    host.clock.advance(2 * HOUR_MS);
    host.ledger.sample("s1", reading(1_000_005, 107));
    host.ledger.stop("s1");
    host.clock.advance(HOUR_MS);
    // A stopped sandbox is not counted.
    host.ledger.sample("s1", reading(9_000_000, 9_000));
    host.ledger.stop("s2");
    let day = UsageAmounts {
        sandbox_ms: HOUR_MS,
        cpu_us: 500_000,
        memory_mib_ms: 1024 * HOUR_MS,
        sent_bytes: 50,
        ..UsageAmounts::default()
    };
    assert_eq!(host.rows(Some("alice")), [(100, day), (101, day)]);
    // The owner `None` is recorded with an empty name.
    assert_eq!(host.total("").sandbox_ms, 3 * HOUR_MS);
    // Two owners on two days.
    assert_eq!(host.rows(None).len(), 4);
}

#[test]
fn counters_that_decrease_count_neither_negative_nor_twice() {
    let host = Host::at_day(1);
    host.ledger.start("s", Some("k"), 1, reading(1000, 500));
    host.ledger.sample("s", reading(3000, 600));
    // A rollback restored an older process.
    host.ledger.sample("s", reading(1500, 100));
    host.ledger.sample("s", reading(1700, 150));
    let total = host.total("k");
    // The CPU time is 2000 before the rollback and 200 after it. The bytes are 100 and 50. The
    // difference to the lower counters is not counted.
    assert_eq!((total.cpu_us, total.sent_bytes), (2200, 150));
    host.ledger.reset("s", reading(10_000, 20_000).unwrap());
    host.ledger.sample("s", reading(10_001, 20_001));
    let total = host.total("k");
    assert_eq!((total.cpu_us, total.sent_bytes), (2201, 151));
}

#[test]
fn a_crash_loses_nothing_of_sandboxes_that_continue() {
    let mut host = Host::at_day(1);
    host.ledger.start("s", Some("k"), 2, reading(100, 10));
    host.clock.advance(50_000);
    host.ledger.sample("s", reading(200, 20));
    host.ledger.write().unwrap();
    // The following usage is measured, but not written before the crash.
    host.clock.advance(30_000);
    host.ledger.sample("s", reading(300, 30));
    let wall_ms = host.clock.now().wall_ms;
    host.ledger.start("new", Some("k"), 2, reading(3, 3));
    host.clock.advance(20_000);
    host.crash();
    // The last argument is the time at which the guest was started. The time of `s` is not needed,
    // since its usage was written before.
    host.ledger.adopt("s", Some("k"), 2, 0);
    host.ledger.adopt("new", Some("k"), 2, wall_ms);
    host.ledger.start("s", Some("k"), 2, reading(400, 40));
    host.ledger.start("new", Some("k"), 2, reading(5, 6));
    let total = host.total("k");
    // `s` ran for 100 seconds and `new` for 20, each with 2 MiB of memory.
    assert_eq!(total.sandbox_ms, 120_000);
    assert_eq!(total.memory_mib_ms, 240_000);
    // `s` used 300 and 30 since its start. The first reading of `new` was lost, so its whole second
    // reading counts.
    assert_eq!((total.cpu_us, total.sent_bytes), (305, 36));
    // A further crash counts nothing twice.
    host.ledger.write().unwrap();
    host.crash();
    assert_eq!(host.total("k"), total);
}

#[test]
fn a_pause_after_the_last_write_is_not_counted_after_a_crash() {
    let mut host = Host::at_day(1);
    host.ledger.start("s", Some("k"), 2, reading(900, 90));
    host.clock.advance(10_000);
    host.ledger.sample("s", reading(1000, 100));
    host.ledger.write().unwrap();
    host.ledger.stop("s");
    host.clock.advance(30_000);
    let resumed_ms = host.clock.now().wall_ms;
    host.ledger.start("s", Some("k"), 2, reading(0, 0));
    host.clock.advance(5_000);
    host.crash();
    host.ledger.adopt("s", Some("k"), 2, resumed_ms);
    host.ledger.start("s", Some("k"), 2, reading(50, 5));
    let total = host.total("k");
    // The sandbox ran for 10 s before its pause and for 5 s after its resume. The CPU time of 50
    // after the resume does not count, because it is below the written value of 1000.
    assert_eq!((total.sandbox_ms, total.cpu_us), (15_000, 100));
}

#[test]
fn a_guest_that_is_lost_with_its_daemon_is_not_counted_afterwards() {
    let mut host = Host::at_day(1);
    host.ledger.start("s", Some("k"), 2, reading(0, 0));
    host.clock.advance(10_000);
    host.ledger.sample("s", None);
    host.ledger.write().unwrap();
    host.clock.advance(HOUR_MS);
    host.crash();
    host.ledger.forget_unadopted();
    // The new daemon resumes the sandbox.
    host.ledger.start("s", Some("k"), 2, reading(0, 0));
    host.clock.advance(5_000);
    host.ledger.stop("s");
    assert_eq!(host.total("k").sandbox_ms, 15_000);
}

#[test]
fn measurements_of_an_earlier_run_of_the_host_are_not_continued() {
    let mut host = Host::at_day(1);
    host.ledger.start("s", Some("k"), 2, reading(0, 0));
    host.ledger.write().unwrap();
    host.clock.advance(HOUR_MS);
    host.clock.boot.store(1, Ordering::Relaxed);
    host.crash();
    host.ledger.adopt("s", Some("k"), 2, 0);
    host.ledger.start("s", Some("k"), 2, reading(0, 0));
    assert!(host.rows(None).is_empty());
}

#[test]
fn steps_of_the_clock_neither_create_nor_remove_days() {
    let mut host = Host::at_day(1000);
    host.ledger.start("s", Some("k"), 1, reading(0, 0));
    host.clock.advance(60_000);
    host.ledger.sample("s", None);
    host.ledger.write().unwrap();
    for wall_ms in [5 * DAY_MS, 20_000 * DAY_MS] {
        host.clock.step_to(wall_ms);
        host.clock.advance(60_000);
        host.ledger.sample("s", None);
        host.ledger.write().unwrap();
        // A daemon that starts meanwhile continues from the written time.
        host.crash();
        host.ledger.adopt("s", Some("k"), 1, 0);
        host.ledger.start("s", Some("k"), 1, reading(0, 0));
    }
    let rows = host.rows(None);
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].0, rows[0].1.sandbox_ms), (1000, 180_000));
    // A step that remains moves later usage to another day, and adds no time.
    host.clock.advance(HOUR_MS);
    host.ledger.sample("s", None);
    host.clock.advance(1000);
    host.ledger.sample("s", None);
    host.ledger.write().unwrap();
    assert_eq!(host.total("k").sandbox_ms, 181_000 + HOUR_MS);
    assert!(host.rows(None).iter().any(|(day, _)| *day == 1000));
}

#[test]
fn the_newest_400_days_with_usage_are_retained() {
    let host = Host::at_day(0);
    let amounts = UsageAmounts {
        function_requests: 1,
        ..UsageAmounts::default()
    };
    for _ in 0..410 {
        host.clock.advance(DAY_MS);
        host.ledger.add(Some("k"), Duration::ZERO, amounts);
        host.ledger.write().unwrap();
    }
    let rows = host.rows(None);
    assert_eq!((rows.len(), rows[0].0), (400, 11));
}

#[test]
fn pages_continue_after_the_last_row_and_include_unwritten_usage() {
    let host = Host::at_day(7);
    let amounts = UsageAmounts {
        sent_bytes: 1,
        ..UsageAmounts::default()
    };
    for (number, owner) in ["a", "b", "c", "d"].into_iter().enumerate() {
        host.ledger.add(Some(owner), Duration::ZERO, amounts);
        if number == 1 {
            host.ledger.write().unwrap();
            host.ledger.add(Some("a"), Duration::ZERO, amounts);
        }
    }
    let mut query = UsageQuery {
        to: Day(7),
        limit: 3,
        ..UsageQuery::default()
    };
    let first = host.ledger.page(&query).unwrap();
    let owners = |page: &UsagePage| -> Vec<String> {
        let rows = page.rows.iter();
        rows.map(|row| row.owner.clone().unwrap()).collect()
    };
    assert_eq!(
        (owners(&first), first.more),
        (vec!["a".into(), "b".into(), "c".into()], true)
    );
    assert_eq!(first.rows[0].amounts.sent_bytes, 2);
    query.after = Some((Day(7), "c".to_owned()));
    let last = host.ledger.page(&query).unwrap();
    assert_eq!((owners(&last), last.more), (vec!["d".into()], false));
    query.to = Day(6);
    assert_eq!(host.ledger.page(&query).unwrap(), UsagePage::default());
}

#[test]
fn the_number_of_owners_of_a_day_is_bounded() {
    let host = Host::at_day(3);
    let amounts = UsageAmounts {
        function_requests: u64::MAX,
        ..UsageAmounts::default()
    };
    // A day has at most 10,000 owners (`MAX_OWNERS`).
    for number in 0..10_005 {
        let owner = format!("k{number:05}");
        host.ledger.add(Some(&owner), Duration::ZERO, amounts);
    }
    host.ledger.write().unwrap();
    // Large sums are limited, and the ledger can still be written.
    for _ in 0..4 {
        host.ledger.add(Some("k00001"), Duration::ZERO, amounts);
        host.ledger.write().unwrap();
    }
    // 1 << 62 is `MAX_SUM`.
    assert_eq!(host.total("k00001").function_requests, 1 << 62);
    // Each of the 5 owners beyond the limit adds 1 << 61 (`MAX_ADDED`), as long as the sum is below
    // `MAX_SUM`.
    assert!(host.total(OTHER_OWNERS).function_requests > 1 << 60);
    assert!(host.total("k10004").is_zero());
}
