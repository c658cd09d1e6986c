//! Warm pool.

use crate::fake;

use fake::{Bench, base, until};
use jiffy_engine_api::{BootMode, SandboxSize};
use jiffy_sandbox_manager::{HostOptions, SnapshotPurpose};
use std::time::Duration;

fn warm(warm: usize) -> HostOptions {
    HostOptions {
        warm,
        ..HostOptions::default()
    }
}

#[tokio::test]
async fn a_create_takes_a_waiting_sandbox_which_nobody_was_before() {
    let bench = Bench::new();
    let host = bench.open_with(warm(2)).await;
    assert_eq!(
        host.create(base()).await.unwrap().boot_mode(),
        Some(BootMode::Snapshot)
    );
    until("the pool to fill", || host.pool().waiting() == 2).await;
    // Waiting guests have no sandbox id.
    let unassigned = bench
        .world
        .running()
        .iter()
        .filter(|id| id.is_empty())
        .count();
    assert_eq!(unassigned, 2);
    let a = host.create(base()).await.unwrap();
    let b = host.create(base()).await.unwrap();
    assert_eq!(
        (a.boot_mode(), b.boot_mode()),
        (Some(BootMode::WarmPool), Some(BootMode::WarmPool))
    );
    assert_ne!(
        bench.world.body(a.id()).sandbox_identity.lock().unwrap().id,
        b.id()
    );
    // If the pool is empty, the guest is restored for the create.
    assert_eq!(
        host.create(base()).await.unwrap().boot_mode(),
        Some(BootMode::Snapshot)
    );
    until("the pool to fill again", || host.pool().waiting() == 2).await;
    host.kill(a.id()).await.unwrap();
    assert_eq!(host.pool().waiting(), 2, "a used one does not come back");
}

#[tokio::test]
async fn a_sandbox_that_waits_has_rehearsed_and_one_that_cannot_does_not_wait() {
    let bench = Bench::new();
    let host = bench.open_with(warm(1)).await;
    host.create(base()).await.unwrap();
    until("the pool to fill", || host.pool().waiting() == 1).await;
    let rehearsed = || *bench.world.rehearsed.lock().unwrap();
    assert_eq!(
        rehearsed(),
        1,
        "not the one that was restored for its creator"
    );
    bench.world.fail("rehearse");
    let sandbox = host.create(base()).await.unwrap();
    assert_eq!(sandbox.boot_mode(), Some(BootMode::WarmPool));
    until("the failure", || rehearsed() == 2).await;
    until("its guest to end", || bench.world.running().len() == 2).await;
    assert_eq!(host.pool().waiting(), 0);
    bench.world.clear_failures();
    let next = host.create(base()).await.unwrap();
    assert_eq!(next.boot_mode(), Some(BootMode::Snapshot));
    until("the pool to fill again", || host.pool().waiting() == 1).await;
    assert_eq!(rehearsed(), 3);
}

#[tokio::test]
async fn the_pool_is_emptied_when_its_template_changes_and_at_the_end() {
    let bench = Bench::new();
    let host = bench.open_with(warm(1)).await;
    host.create(base()).await.unwrap();
    until("the pool to fill", || host.pool().waiting() == 1).await;
    *bench.world.version.lock().unwrap() += 1;
    assert_eq!(
        host.create(base()).await.unwrap().boot_mode(),
        Some(BootMode::Snapshot)
    );
    assert_eq!(host.pool().waiting(), 0);
    until("the pool to fill", || host.pool().waiting() == 1).await;
    host.stop_all().await;
    assert!(bench.world.running().is_empty());
}

#[tokio::test]
async fn what_waits_is_kept_in_memory_as_long_as_it_waits() {
    let bench = Bench::new();
    let host = bench
        .open_with(HostOptions {
            upkeep_interval: Duration::from_millis(5),
            ..warm(1)
        })
        .await;
    host.create(base()).await.unwrap();
    until("the pool to fill", || host.pool().waiting() == 1).await;
    let snapshot = host.snapshots().list(None).unwrap().remove(0);
    let prefetched = || bench.world.prefetched.lock().unwrap().clone();
    until("two rounds", || prefetched().len() >= 2).await;
    assert!(prefetched().iter().all(|id| *id == snapshot.id()));
    // The snapshots of an empty pool are not prefetched.
    host.stop_all().await;
    assert_eq!(host.pool().waiting(), 0);
    let rounds = || {
        bench.world.prefetched.lock().unwrap().clear();
        std::thread::sleep(Duration::from_millis(100));
        prefetched().len()
    };
    until("the last round", || rounds() == 0).await;
}

#[tokio::test]
async fn what_a_templates_guests_touch_is_learned_once_and_its_failure_costs_nothing() {
    let bench = Bench::new();
    let host = bench.open().await;
    host.create(base()).await.unwrap();
    host.create(base()).await.unwrap();
    let template = host.snapshots().list(None).unwrap().remove(0);
    assert_eq!(template.purpose(), SnapshotPurpose::Template);
    assert_eq!(*bench.world.working_sets.lock().unwrap(), [template.id()]);
    *bench.world.version.lock().unwrap() += 1;
    bench.world.fail("learn");
    host.create(base()).await.unwrap();
    assert_eq!(bench.world.working_sets.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn what_is_kept_is_sealed_also_what_an_earlier_daemon_left() {
    let bench = Bench::new();
    let options = HostOptions {
        upkeep_interval: Duration::from_millis(5),
        ..HostOptions::default()
    };
    let host = bench.open_with(options.clone()).await;
    let sandbox = host.create(base()).await.unwrap();
    let requested = host.snapshot(sandbox.id(), None).await.unwrap();
    let forked = host.fork(sandbox.id(), 1, None).await.unwrap();
    let (fork, child) = (forked.snapshot, forked.children[0].as_ref().unwrap());
    let mut all = host.snapshots().list(None).unwrap().into_iter();
    let template = all
        .find(|s| s.purpose() == SnapshotPurpose::Template)
        .unwrap();
    let checksummed = || bench.world.checksummed.lock().unwrap().clone();
    let both = [requested.id().to_owned(), template.id().to_owned()].into();
    until("both to be checksummed", || checksummed() == both).await;
    assert!(!checksummed().contains(fork.id()));
    drop(host);
    bench.world.checksummed.lock().unwrap().clear();
    let host = bench.open_with(options).await;
    until("both to be looked at again", || checksummed() == both).await;
    // A snapshot that is removed before it is checked causes no error.
    host.remove(child.id()).await.unwrap();
    host.remove(sandbox.id()).await.unwrap();
    host.snapshots().remove(requested.id()).unwrap();
    until("its files to go", || {
        !bench.file_names().contains(requested.id())
    })
    .await;
}

#[tokio::test]
async fn a_pool_grows_and_shrinks_as_it_is_told() {
    let bench = Bench::new();
    let host = bench.open_with(warm(0)).await;
    let size = SandboxSize::default();
    let pool = host.pool().set("base", size, 3).await.unwrap();
    assert_eq!((pool.template.as_str(), pool.wanted), ("base", 3));
    until("the pool to fill", || host.pool().waiting() == 3).await;
    let first = host.create(base()).await.unwrap();
    assert_eq!(first.boot_mode(), Some(BootMode::WarmPool));
    let pool = host.pool().set("base", size, 1).await.unwrap();
    assert_eq!((pool.wanted, pool.waiting), (1, 1));
    host.pool().set("base", size, 0).await.unwrap();
    assert_eq!(host.pool().waiting(), 0);
    until("those too many to end", || {
        bench.world.running() == [first.id().to_owned()]
    })
    .await;
    assert_eq!(host.pool().sizes().len(), 1);
    bench.world.fail("boot");
    assert!(host.pool().set("other", size, 1).await.is_err());
}

#[tokio::test]
async fn sizes_that_callers_choose_keep_a_bounded_number_of_template_snapshots() {
    let bench = Bench::new();
    let host = bench.open_with(HostOptions::default()).await;
    let usual = host
        .create(base())
        .await
        .unwrap()
        .snapshot()
        .map(str::to_owned);
    let mut spec = base();
    for memory_mib in (0..20).map(|n| 512 + n) {
        spec.size = Some(SandboxSize {
            memory_mib,
            ..SandboxSize::default()
        });
        let sandbox = host.create(spec.clone()).await.unwrap();
        host.remove(sandbox.id()).await.unwrap();
        // The size that is in use retains its snapshot.
        let sandbox = host.create(base()).await.unwrap();
        assert_eq!(sandbox.snapshot(), usual.as_deref());
        host.remove(sandbox.id()).await.unwrap();
        let all = host.snapshots().list(None).unwrap();
        let of_template = all
            .iter()
            .filter(|s| s.purpose() == SnapshotPurpose::Template);
        assert!(of_template.count() <= 8, "{all:?}");
    }
}

#[tokio::test]
async fn sizes_that_are_made_at_the_same_time_do_not_take_each_others_snapshots() {
    let bench = Bench::new();
    let host = bench.open_with(HostOptions::default()).await;
    let creates = (0..20).map(|n| {
        let (host, mut spec) = (host.clone(), base());
        spec.size = Some(SandboxSize {
            memory_mib: 512 + n,
            ..SandboxSize::default()
        });
        tokio::spawn(async move { host.create(spec).await })
    });
    for create in creates.collect::<Vec<_>>() {
        create.await.unwrap().unwrap();
    }
}
