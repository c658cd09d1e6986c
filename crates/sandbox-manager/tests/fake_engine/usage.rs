//! Usage of owners: which times of a sandbox count.

use crate::fake;

use fake::{Bench, base, snapshot_id, until};
use jiffy_sandbox_manager::{
    CreateSpec, Day, HostOptions, SandboxSettings, Sandboxes, UsageAmounts, UsageClock,
    UsageLedger, UsageMoment, UsageQuery,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Clock that the test advances, in milliseconds since its start at the present time.
struct TestClock {
    start_ms: u64,
    elapsed_ms: AtomicU64,
}

impl Default for TestClock {
    fn default() -> Self {
        Self {
            start_ms: jiffy_engine_api::now_ms(),
            elapsed_ms: AtomicU64::new(0),
        }
    }
}

impl TestClock {
    fn advance(&self, seconds: u64) {
        self.elapsed_ms.fetch_add(seconds * 1000, Ordering::Relaxed);
    }
}

impl UsageClock for TestClock {
    fn now(&self) -> UsageMoment {
        let up_ms = self.elapsed_ms.load(Ordering::Relaxed);
        UsageMoment {
            wall_ms: self.start_ms + up_ms,
            up_ms,
        }
    }

    fn boot(&self) -> String {
        "boot".to_owned()
    }
}

/// Opens a host whose ledger uses this clock.
async fn open(bench: &Bench, clock: &Arc<TestClock>) -> Sandboxes {
    let file = bench.dir.path().join("usage.db");
    let options = HostOptions {
        usage: UsageLedger::open_with(&file, clock.clone()).unwrap(),
        // Only operations measure.
        sample: Duration::from_secs(3600),
        ..HostOptions::default()
    };
    bench.open_with(options).await
}

async fn create(host: &Sandboxes, owner: &str) -> String {
    let settings = SandboxSettings {
        owner: Some(owner.to_owned()),
        ..SandboxSettings::default()
    };
    let spec = CreateSpec { settings, ..base() };
    host.create(spec).await.unwrap().id().to_owned()
}

/// Returns the usage of an owner until its last measurement.
fn used(host: &Sandboxes, owner: &str) -> UsageAmounts {
    let query = UsageQuery {
        owner: Some(owner.to_owned()),
        to: Day(u32::MAX),
        limit: 1000,
        ..UsageQuery::default()
    };
    let page = host.usage().page(&query).unwrap();
    let mut sum = UsageAmounts::default();
    page.rows.iter().for_each(|row| sum.add(&row.amounts));
    sum
}

fn seconds(host: &Sandboxes, owner: &str) -> u64 {
    used(host, owner).sandbox_ms / 1000
}

#[tokio::test]
async fn paused_sandboxes_do_not_count_and_a_kill_counts_the_last_part() {
    let (bench, clock) = (Bench::new(), Arc::new(TestClock::default()));
    let host = open(&bench, &clock).await;
    let id = create(&host, "alice").await;
    clock.advance(10);
    host.pause(&id).await.unwrap();
    assert_eq!(seconds(&host, "alice"), 10);
    clock.advance(1000);
    host.resume(&id).await.unwrap();
    clock.advance(5);
    let forked = host.fork(&id, 1, None).await.unwrap();
    let child = forked.children[0].as_ref().unwrap().id().to_owned();
    clock.advance(2);
    host.kill(&id).await.unwrap();
    host.kill(&id).await.unwrap();
    assert_eq!(seconds(&host, "alice"), 17);
    clock.advance(100);
    host.kill(&child).await.unwrap();
    let total = used(&host, "alice");
    // The parent ran for 17 s, and the child for 102 s: 2 s before and 100 s after the end of its
    // parent. Each of them has 512 MiB.
    assert_eq!(total.sandbox_ms, 119_000);
    assert_eq!(total.memory_mib_ms, 119_000 * 512);
    // Each measurement of the fake guest adds a millisecond of processor time. The few operations
    // above measure fewer than 100 times.
    assert!((1..100_000).contains(&total.cpu_us), "{total:?}");
    assert_eq!(used(&host, "bob"), UsageAmounts::default());
}

#[tokio::test]
async fn rollbacks_count_each_moment_once() {
    for in_place in [true, false] {
        let (bench, clock) = (Bench::new(), Arc::new(TestClock::default()));
        bench
            .world
            .supports_rollback
            .store(in_place, Ordering::Relaxed);
        let host = open(&bench, &clock).await;
        let id = create(&host, "alice").await;
        clock.advance(3);
        let snapshot = snapshot_id(&host, &id).await;
        for _ in 0..3 {
            clock.advance(10);
            host.rollback(&id, &snapshot).await.unwrap();
        }
        clock.advance(1);
        host.write_usage().await;
        // 3 s before the snapshot, three times 10 s, and 1 s.
        assert_eq!(seconds(&host, "alice"), 34);
        let before = used(&host, "alice").cpu_us;
        host.rollback(&id, &snapshot).await.unwrap();
        let after = used(&host, "alice").cpu_us;
        assert!(
            // One rollback measures fewer than 100 times, and each measurement adds a millisecond.
            after >= before && after < before + 100_000,
            "{before} {after}"
        );
        host.kill(&id).await.unwrap();
    }
}

#[tokio::test]
async fn a_guest_that_exits_by_itself_counts_until_its_exit() {
    let (bench, clock) = (Bench::new(), Arc::new(TestClock::default()));
    let host = open(&bench, &clock).await;
    let id = create(&host, "alice").await;
    clock.advance(7);
    bench.world.panic_guest(&id);
    until("the exit", || seconds(&host, "alice") == 7).await;
    clock.advance(50);
    host.write_usage().await;
    assert_eq!(seconds(&host, "alice"), 7);
}

#[test]
fn usage_survives_a_killed_daemon_and_continues_with_adopted_guests() {
    let (bench, clock) = (Bench::new(), Arc::new(TestClock::default()));
    let mut ids = Vec::new();
    bench.run_and_kill(async {
        let host = open(&bench, &clock).await;
        ids.push(create(&host, "alice").await);
        ids.push(create(&host, "bob").await);
        clock.advance(20);
        host.write_usage().await;
        clock.advance(30);
        host.pause(&ids[1]).await.unwrap();
    });
    clock.advance(600);
    bench.run_and_kill(async {
        let host = open(&bench, &clock).await;
        // The 30 s before the pause were not written, and are lost. The other sandbox ran all the
        // time, so the next daemon counts its complete time.
        assert_eq!(seconds(&host, "bob"), 20);
        host.kill(&ids[0]).await.unwrap();
        assert_eq!(seconds(&host, "alice"), 650);
        host.resume(&ids[1]).await.unwrap();
        clock.advance(1);
        host.kill(&ids[1]).await.unwrap();
        assert_eq!(seconds(&host, "bob"), 21);
    });
}
