//! Rollbacks in place: the guest returns to a snapshot without being replaced.

use crate::fake;

use fake::{Bench, create_id, snapshot_id, until};
use jiffy_sandbox_manager::{SandboxState, Sandboxes};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Creates a sandbox with text `later`. Returns its id and its snapshot of the text `old`.
async fn sandbox(bench: &Bench, host: &Sandboxes) -> (String, String) {
    bench.world.supports_rollback.store(true, Ordering::Relaxed);
    let id = create_id(host).await;
    bench.world.write(&id, "old");
    let snapshot = snapshot_id(host, &id).await;
    bench.world.write(&id, "later");
    host.snapshot(&id, None).await.unwrap();
    (id, snapshot)
}

/// Checks that the sandbox runs with `text`, and that snapshots, rollbacks and pauses continue from
/// there.
async fn check_continues(bench: &Bench, host: &Sandboxes, id: &str, text: &str) {
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
async fn a_supported_rollback_happens_in_place() {
    let bench = Bench::new();
    let host = bench.open().await;
    let (id, snapshot) = sandbox(&bench, &host).await;
    let restores = *bench.world.restores.lock().unwrap();
    let record = host.rollback(&id, &snapshot).await.unwrap();
    assert_eq!(record.snapshot(), Some(&*snapshot));
    assert_eq!(*bench.world.restores.lock().unwrap(), restores);
    let body = bench.world.body(&id);
    assert!(body.sandbox_identity.lock().unwrap().rewound);
    check_continues(&bench, &host, &id, "old").await;
}

#[tokio::test]
async fn the_next_daemon_adopts_a_guest_after_a_rollback_in_place() {
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
async fn a_rejected_or_failed_rollback_in_place_restores_another_guest() {
    // The guest rejects the rollback, or is lost after the rollback.
    for step in ["rollback", "rollback-done"] {
        let bench = Bench::new();
        let host = bench.open().await;
        let (id, snapshot) = sandbox(&bench, &host).await;
        bench.world.fail(step);
        let restores = *bench.world.restores.lock().unwrap();
        host.rollback(&id, &snapshot).await.unwrap();
        assert_eq!(*bench.world.restores.lock().unwrap(), restores + 1);
        bench.world.clear_failures();
        check_continues(&bench, &host, &id, "old").await;
    }
}

#[tokio::test]
async fn a_rejected_rollback_without_a_restore_has_no_effect() {
    let bench = Bench::new();
    let host = bench.open().await;
    let (id, snapshot) = sandbox(&bench, &host).await;
    bench.world.fail("rollback");
    bench.world.fail("restore");
    assert!(host.rollback(&id, &snapshot).await.is_err());
    // The journal has recorded the sandbox as paused and then as running again.
    bench.world.clear_failures();
    // The result is the same with the next daemon.
    host.close().await;
    drop(host);
    let host = bench.open().await;
    assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Running);
    assert_eq!(bench.world.read(&id), "later");
}

#[tokio::test]
async fn a_lost_guest_that_cannot_be_restored_leaves_the_sandbox_paused() {
    let bench = Bench::new();
    let host = bench.open().await;
    let (id, snapshot) = sandbox(&bench, &host).await;
    bench.world.fail("rollback-done");
    bench.world.fail("restore");
    assert!(host.rollback(&id, &snapshot).await.is_err());
    bench.world.clear_failures();
    let paused = host.get(&id).unwrap();
    assert_eq!(*paused.state(), SandboxState::Paused);
    assert_eq!(paused.snapshot(), Some(&*snapshot));
    assert!(bench.world.running().is_empty());
    host.resume(&id).await.unwrap();
    check_continues(&bench, &host, &id, "old").await;
}

#[test]
fn a_daemon_killed_during_a_rollback_in_place_leaves_the_sandbox_paused() {
    for step in ["rollback", "rollback-done"] {
        let bench = Bench::new();
        let sandbox_id = Arc::new(Mutex::new(None));
        bench.run_and_kill(async {
            let host = bench.open().await;
            let (id, snapshot) = sandbox(&bench, &host).await;
            bench.world.hang(step);
            *sandbox_id.lock().unwrap() = Some(id.clone());
            tokio::spawn(async move { drop(host.rollback(&id, &snapshot).await) });
            until("the rollback to start", || {
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
            check_continues(&bench, &host, &id, "old").await;
        });
    }
}
