//! Warm pool, and the background work for snapshots of templates and of the pool.
//!
//! A *rehearsal* runs a few commands in a waiting guest, so that its first real command is fast.
//! The *working set* of a snapshot is the memory that a restored guest accesses first.

use crate::fake;

use fake::{Bench, base, until};
use jiffy_engine_api::{BootMode, SandboxSize};
use jiffy_sandbox_manager::{
    HostFigures, HostLimits, HostOptions, HostReader, PoolDemand, SnapshotPurpose,
};
use std::sync::Arc;
use std::time::Duration;

fn warm(warm: usize) -> HostOptions {
    HostOptions {
        warm,
        ..HostOptions::default()
    }
}

#[tokio::test]
async fn a_create_takes_an_unassigned_guest_of_the_pool() {
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
    assert_eq!(
        host.pool().waiting(),
        2,
        "a used guest does not return to the pool"
    );
}

#[tokio::test]
async fn pool_guests_are_rehearsed_and_a_failed_rehearsal_adds_none() {
    let bench = Bench::new();
    let host = bench.open_with(warm(1)).await;
    host.create(base()).await.unwrap();
    until("the pool to fill", || host.pool().waiting() == 1).await;
    let rehearsed = || *bench.world.rehearsed.lock().unwrap();
    assert_eq!(
        rehearsed(),
        1,
        "a guest that was restored for a create is not rehearsed"
    );
    bench.world.fail("rehearse");
    let sandbox = host.create(base()).await.unwrap();
    assert_eq!(sandbox.boot_mode(), Some(BootMode::WarmPool));
    until("the failure", || rehearsed() == 2).await;
    until("the exit of its guest", || bench.world.running().len() == 2).await;
    assert_eq!(host.pool().waiting(), 0);
    bench.world.clear_failures();
    let next = host.create(base()).await.unwrap();
    assert_eq!(next.boot_mode(), Some(BootMode::Snapshot));
    until("the pool to fill again", || host.pool().waiting() == 1).await;
    assert_eq!(rehearsed(), 3);
}

#[tokio::test]
async fn the_pool_is_emptied_when_its_template_changes_or_guests_are_stopped() {
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
async fn snapshots_of_waiting_guests_are_prefetched_periodically() {
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
async fn the_working_set_of_a_template_is_recorded_once() {
    let bench = Bench::new();
    let host = bench.open().await;
    host.create(base()).await.unwrap();
    host.create(base()).await.unwrap();
    let template = host.snapshots().list(None).unwrap().remove(0);
    assert_eq!(template.purpose(), SnapshotPurpose::Template);
    assert_eq!(*bench.world.working_sets.lock().unwrap(), [template.id()]);
    *bench.world.version.lock().unwrap() += 1;
    // A create succeeds also if the working set cannot be recorded.
    bench.world.fail("working-set");
    host.create(base()).await.unwrap();
    assert_eq!(bench.world.working_sets.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn retained_snapshots_receive_checksums_also_after_a_restart() {
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
    until("both to be checked again", || checksummed() == both).await;
    // A snapshot that is removed before its checksums are written causes no error.
    host.remove(child.id()).await.unwrap();
    host.remove(sandbox.id()).await.unwrap();
    host.snapshots().remove(requested.id()).unwrap();
    until("the removal of the files", || {
        !bench.file_names().contains(requested.id())
    })
    .await;
}

#[tokio::test]
async fn setting_the_target_grows_and_shrinks_the_pool() {
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
    until("the surplus guests to exit", || {
        bench.world.running() == [first.id().to_owned()]
    })
    .await;
    assert_eq!(host.pool().sizes().len(), 1);
    bench.world.fail("boot");
    assert!(host.pool().set("other", size, 1).await.is_err());
}

#[tokio::test]
async fn a_pool_follows_a_demand_within_a_part_of_the_free_memory() {
    let figures = Arc::new(FreeMemory(100_000));
    let options = |warm| HostOptions {
        warm,
        reader: Some(figures.clone()),
        ..HostOptions::default()
    };
    let bench = Bench::new();
    let host = bench.open_with(options(1)).await;
    let size = SandboxSize::default();
    let demand = |guests| {
        [PoolDemand {
            template: "base".to_owned(),
            size,
            guests,
        }]
    };
    let configured = || host.pool().sizes().iter().map(|p| p.wanted).max();
    // A template that was never used on this host is booted.
    host.pool().follow(&demand(3)).await;
    until("the pool to fill", || host.pool().waiting() == 3).await;
    let first = host.create(base()).await.unwrap();
    assert_eq!(first.boot_mode(), Some(BootMode::WarmPool));
    assert_eq!(configured(), Some(3));
    // Guests of another size do not follow the demand.
    let mut other = base();
    other.size = Some(SandboxSize {
        memory_mib: size.memory_mib + 1,
        ..size
    });
    host.create(other).await.unwrap();
    // Three guests because of the demand, and one (the usual number) of the other size.
    until("both pools to fill", || host.pool().waiting() == 4).await;
    // Guests that wait because of a demand use at most a tenth of the memory.
    host.pool().follow(&demand(1_000)).await;
    let affordable = configured().unwrap() as u64;
    let memory = 10_000.0 * HostLimits::default().memory_overcommit;
    let most = memory as u64 / u64::from(size.memory_mib);
    assert!((1..=most).contains(&affordable), "{affordable} of {most}");
    // A number that an operator has set does not change.
    host.pool().set("base", size, 2).await.unwrap();
    host.pool().follow(&demand(5)).await;
    assert_eq!(configured(), Some(2));
    host.stop_all().await;
    let bench = Bench::new();
    let host = bench.open_with(options(1)).await;
    host.pool().follow(&demand(4)).await;
    until("the pool to fill", || host.pool().waiting() == 4).await;
    host.pool().follow(&[]).await;
    // Without a demand, the pool has one guest, the configured number.
    until("the surplus guests to exit", || {
        bench.world.running().len() == 1
    })
    .await;
    host.stop_all().await;
    // A host that was started without warm pools does not follow the demand.
    let bench = Bench::new();
    let host = bench.open_with(options(0)).await;
    host.pool().follow(&demand(4)).await;
    assert_eq!(host.pool().sizes(), []);
    assert!(bench.world.running().is_empty());
}

/// Host with this amount of available memory in MiB.
#[derive(Debug)]
struct FreeMemory(u64);

impl HostReader for FreeMemory {
    fn read(&self) -> HostFigures {
        HostFigures {
            memory_available_mib: Some(self.0),
            memory_total_mib: Some(self.0),
            ..HostFigures::default()
        }
    }
}

#[tokio::test]
async fn the_number_of_template_snapshots_of_different_sizes_is_bounded() {
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
        // A template has snapshots of at most eight sizes (`MAX_SIZES_PER_TEMPLATE`).
        assert!(of_template.count() <= 8, "{all:?}");
    }
}

#[tokio::test]
async fn concurrent_creates_of_many_sizes_do_not_retire_each_other() {
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
    // A template has snapshots of a limited number of sizes: a snapshot of another size is
    // *retired* (removed) for a new one. A create fails if its snapshot was retired before its
    // first use.
    for create in creates.collect::<Vec<_>>() {
        create.await.unwrap().unwrap();
    }
}
