//! Rollbacks in place of the guest.

use crate::fake;

use fake::{Bench, create_id, snapshot_id, until};
use jiffy_sandbox_manager::{SandboxState, Sandboxes};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Creates a sandbox with text `later`, and returns it with its snapshot of the text `old`.
async fn sandbox(bench: &Bench, host: &Sandboxes) -> (String, String) {
    bench.world.supports_rollback.store(true, Ordering::Relaxed);
    let id = create_id(host).await;
    bench.world.write(&id, "old");
    let snapshot = snapshot_id(host, &id).await;
    bench.world.write(&id, "later");
    host.snapshot(&id, None).await.unwrap();
    (id, snapshot)
}

/// Checks that snapshots, pauses and rollbacks continue from `text`.
async fn goes_on(bench: &Bench, host: &Sandboxes, id: &str, text: &str) {
    assert_eq!(*host.get(id).unwrap().state(), SandboxState::Running);
    assert_eq!(bench.world.running(), [id]);
    assert_eq!(bench.world.read(id), text);
    let snapshot = snapshot_id(host, id).await;
    bench.world.write(id, "newer");
    host.rollback(id, &snapshot).await.unwrap();
    assert_eq!(bench.world.read(id), text);
    host.pause(id).await.unwrap();
    host.resume(id).await.unwrap();
    assert_eq!(bench.world.read(id), text);
}

#[tokio::test]
async fn a_guest_that_can_goes_back_in_its_place_and_is_told_so() {
    let bench = Bench::new();
    let host = bench.open().await;
    let (id, snapshot) = sandbox(&bench, &host).await;
    let restores = *bench.world.restores.lock().unwrap();
    let record = host.rollback(&id, &snapshot).await.unwrap();
    assert_eq!(record.snapshot(), Some(&*snapshot));
    assert_eq!(*bench.world.restores.lock().unwrap(), restores);
    let body = bench.world.body(&id);
    assert!(body.sandbox_identity.lock().unwrap().rewound);
    goes_on(&bench, &host, &id, "old").await;
}

#[tokio::test]
async fn the_next_daemon_adopts_a_guest_that_went_back() {
    let bench = Bench::new();
    let host = bench.open().await;
    let (id, snapshot) = sandbox(&bench, &host).await;
    host.rollback(&id, &snapshot).await.unwrap();
    host.close().await;
    drop(host);
    let host = bench.open().await;
    assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Running);
    assert_eq!(bench.world.read(&id), "old");
}

#[tokio::test]
async fn a_guest_that_cannot_go_back_is_replaced_and_one_that_is_lost_is_restored() {
    for step in ["go-back", "going-back"] {
        let bench = Bench::new();
        let host = bench.open().await;
        let (id, snapshot) = sandbox(&bench, &host).await;
        bench.world.fail(step);
        let restores = *bench.world.restores.lock().unwrap();
        host.rollback(&id, &snapshot).await.unwrap();
        assert_eq!(*bench.world.restores.lock().unwrap(), restores + 1);
        bench.world.clear_failures();
        goes_on(&bench, &host, &id, "old").await;
    }
}

#[tokio::test]
async fn a_refused_rollback_that_fails_leaves_the_sandbox_as_it_was() {
    let bench = Bench::new();
    let host = bench.open().await;
    let (id, snapshot) = sandbox(&bench, &host).await;
    bench.world.fail("go-back");
    bench.world.fail("restore");
    assert!(host.rollback(&id, &snapshot).await.is_err());
    bench.world.clear_failures();
    // The result is the same with the next daemon.
    host.close().await;
    drop(host);
    let host = bench.open().await;
    assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Running);
    assert_eq!(bench.world.read(&id), "later");
}

#[tokio::test]
async fn a_sandbox_whose_guest_is_lost_and_cannot_be_restored_sleeps_in_the_snapshot() {
    let bench = Bench::new();
    let host = bench.open().await;
    let (id, snapshot) = sandbox(&bench, &host).await;
    bench.world.fail("going-back");
    bench.world.fail("restore");
    assert!(host.rollback(&id, &snapshot).await.is_err());
    bench.world.clear_failures();
    let paused = host.get(&id).unwrap();
    assert_eq!(*paused.state(), SandboxState::Paused);
    assert_eq!(paused.snapshot(), Some(&*snapshot));
    assert!(bench.world.running().is_empty());
    host.resume(&id).await.unwrap();
    goes_on(&bench, &host, &id, "old").await;
}

#[test]
fn killed_half_way_the_sandbox_sleeps_in_the_snapshot() {
    for step in ["go-back", "going-back"] {
        let bench = Bench::new();
        let sandbox_id = Arc::new(Mutex::new(None));
        bench.run_and_kill(async {
            let host = bench.open().await;
            let (id, snapshot) = sandbox(&bench, &host).await;
            bench.world.hang(step);
            *sandbox_id.lock().unwrap() = Some(id.clone());
            tokio::spawn(async move { drop(host.rollback(&id, &snapshot).await) });
            until("the step", || {
                bench.world.rollback_started.load(Ordering::Relaxed)
            })
            .await;
        });
        bench.world.clear_failures();
        let id = sandbox_id.lock().unwrap().take().unwrap();
        bench.run_and_kill(async {
            let host = bench.open().await;
            assert_eq!(
                *host.get(&id).unwrap().state(),
                SandboxState::Paused,
                "{step}"
            );
            assert!(bench.world.running().is_empty());
            host.resume(&id).await.unwrap();
            goes_on(&bench, &host, &id, "old").await;
        });
    }
}
