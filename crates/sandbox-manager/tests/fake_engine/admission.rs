//! Admission control: a host accepts no more guests than it has resources for, and reports whether
//! a retry is worthwhile.

use crate::fake;

use fake::{Bench, base, create_id, snapshot_id, until};
use jiffy_engine_api::SandboxSize;
use jiffy_sandbox_manager::{
    CreateSpec, ErrorKind, HostFigures, HostLimits, HostOptions, HostReader, OperationError,
    SandboxState, Sandboxes, Shortage,
};
use std::sync::{Arc, Mutex};
use tokio::task::JoinSet;

/// Host whose figures the test sets.
#[derive(Debug, Default)]
struct AdjustableFigures(Mutex<HostFigures>);

impl HostReader for AdjustableFigures {
    fn read(&self) -> HostFigures {
        *self.0.lock().unwrap()
    }
}

impl AdjustableFigures {
    /// Sets the memory of the host, in MiB.
    fn memory(&self, total: u64, available: u64) {
        let mut figures = self.0.lock().unwrap();
        figures.memory_total_mib = Some(total);
        figures.memory_available_mib = Some(available);
    }
}

/// Opens a host with these limits and `warm` guests in its warm pool. Also returns the figures of
/// the host, which the test sets.
async fn open(
    bench: &Bench,
    warm: usize,
    limits: HostLimits,
) -> (Sandboxes, Arc<AdjustableFigures>) {
    let figures = Arc::new(AdjustableFigures::default());
    let options = HostOptions {
        warm,
        limits,
        reader: Some(figures.clone()),
        ..HostOptions::default()
    };
    (bench.open_with(options).await, figures)
}

/// Returns limits that permit this number of sandboxes.
fn at_most(sandboxes: usize) -> HostLimits {
    HostLimits {
        sandboxes: Some(sandboxes),
        ..HostLimits::default()
    }
}

/// Checks that an operation was rejected because the host is busy.
fn assert_busy<T: std::fmt::Debug>(result: Result<T, OperationError>) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.retry_after().is_some() && !error.is_refusal());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_creates_never_exceed_the_limit() {
    let bench = Bench::new();
    let (host, _) = open(&bench, 0, at_most(40)).await;
    host.create(base()).await.unwrap();
    let mut work = JoinSet::new();
    for _ in 0..1000 {
        let (host, world) = (host.clone(), bench.world.clone());
        work.spawn(async move {
            let result = host.create(base()).await;
            assert!(world.running().len() <= 40);
            result.map(drop).map_err(|e| e.kind())
        });
    }
    let answers: Vec<_> = work.join_all().await;
    let successes = answers.iter().filter(|a| a.is_ok()).count();
    let rejections = answers.iter().filter(|a| **a == Err(ErrorKind::Busy));
    // 40 sandboxes are permitted, and a sandbox was created before.
    assert_eq!((successes, rejections.count()), (39, 961));
    assert_eq!(bench.world.running().len(), 40);
    assert_eq!(host.list().len(), 40, "rejected creates leave no sandbox");
    let reservations = host.figures().reservations();
    assert_eq!((reservations.sandboxes, reservations.starting), (40, 0));
    assert_eq!(reservations.rejections[&Shortage::Sandboxes], 961);
}

#[tokio::test]
async fn every_start_is_admitted_and_every_end_releases_resources() {
    let bench = Bench::new();
    let (host, _) = open(&bench, 0, at_most(2)).await;
    let paused = create_id(&host).await;
    let snapshot = snapshot_id(&host, &paused).await;
    host.pause(&paused).await.unwrap();
    let [a, b] = [create_id(&host).await, create_id(&host).await];
    assert_busy(host.create(base()).await);
    assert_busy(host.resume(&paused).await);
    assert_busy(host.ensure_running(&paused).await);
    assert_busy(host.rollback(&paused, &snapshot).await);
    assert_eq!(*host.get(&paused).unwrap().state(), SandboxState::Paused);
    let fork = host.fork(&a, 2, None).await.unwrap();
    fork.children.into_iter().for_each(assert_busy);
    // The rollback of a running sandbox needs no further reservation.
    let own = snapshot_id(&host, &a).await;
    host.rollback(&a, &own).await.unwrap();
    assert_eq!(host.figures().reservations().sandboxes, 2);

    bench.world.panic_guest(&b);
    until("the exit to be noticed", || {
        host.figures().reservations().sandboxes == 1
    })
    .await;
    host.resume(&paused).await.unwrap();
    // The guest of `b` has exited, so a rollback of `b` starts a guest.
    assert_busy(host.rollback(&b, &snapshot).await);
    host.kill(&a).await.unwrap();
    host.rollback(&b, &snapshot).await.unwrap();
    assert_busy(host.create(base()).await);
    host.remove(&b).await.unwrap();
    bench.world.fail("restore");
    assert!(host.create(base()).await.is_err());
    bench.world.clear_failures();
    // The failed create has released its reservation.
    host.create(base()).await.unwrap();
    host.stop_all().await;
    let reservations = host.figures().reservations();
    assert_eq!((reservations.sandboxes, reservations.memory_mib), (0, 0));
}

#[tokio::test]
async fn warm_pool_guests_are_evicted_for_creates() {
    let bench = Bench::new();
    let limits = HostLimits {
        memory_overcommit: 1.0,
        reserve_memory_mib: Some(0),
        ..HostLimits::default()
    };
    let (host, figures) = open(&bench, 2, limits).await;
    figures.memory(2048, 2048);
    host.create(base()).await.unwrap();
    until("the pool to fill", || host.pool().waiting() == 2).await;
    // The sandbox and both guests of the pool have the default size of 512 MiB.
    assert_eq!(host.figures().reservations().memory_mib, 3 * 512);
    // Together with the first sandbox, this one needs all 2,048 MiB, so both guests of the pool are
    // stopped.
    let large = CreateSpec {
        size: Some(SandboxSize {
            memory_mib: 1536,
            ..SandboxSize::default()
        }),
        ..base()
    };
    host.create(large).await.unwrap();
    assert_eq!(
        (
            host.pool().waiting(),
            host.figures().reservations().memory_mib
        ),
        (0, 2048)
    );
    assert_busy(host.create(base()).await);
}

#[tokio::test]
async fn a_host_with_few_resources_rejects_starts_until_it_recovers() {
    let bench = Bench::new();
    let (host, figures) = open(&bench, 0, HostLimits::default()).await;
    figures.memory(16_384, 12_000);
    let id = create_id(&host).await;
    // At least 819 MiB must stay available: 5 % of the memory of the host.
    figures.memory(16_384, 500);
    assert_busy(host.create(base()).await);
    // Operations that free resources are always possible.
    host.pause(&id).await.unwrap();
    assert_busy(host.resume(&id).await);
    figures.memory(16_384, 12_000);
    host.resume(&id).await.unwrap();
    // A sandbox that is too large for the host even without other sandboxes.
    let giant = CreateSpec {
        size: Some(SandboxSize {
            memory_mib: 16_384,
            ..SandboxSize::default()
        }),
        ..base()
    };
    let error = host.create(giant).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry_after()),
        (ErrorKind::TooLarge, None)
    );
}
