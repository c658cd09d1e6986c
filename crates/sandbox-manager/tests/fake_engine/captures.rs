//! Captured snapshots are visible as soon as they are acknowledged. Operations that need their
//! files wait until they are stored, also after a restart of the daemon.
//!
//! A snapshot is *captured* when its content is fixed, while the guest continues to run. It is
//! *stored* when the engine has written its files. A captured snapshot whose files can no longer be
//! written is *lost*.

use crate::fake;

use fake::{Bench, base, create_id, until};
use jiffy_sandbox_manager::{
    CreateSpec, ErrorKind, FetchScope, OperationError, SandboxSource, SandboxState, Sandboxes,
    Snapshot,
};
use std::sync::{Arc, Mutex};
use tokio::task::JoinHandle;

/// Creates a sandbox with the text `captured`, captures a snapshot that is not stored yet, and
/// changes the text.
async fn capture(bench: &Bench, host: &Sandboxes) -> (String, Snapshot) {
    let id = create_id(host).await;
    bench.world.write(&id, "captured");
    bench.world.storing_waits.send_replace(true);
    let snapshot = host.capture(&id, Some("name".into())).await.unwrap();
    bench.world.write(&id, "later");
    (id, snapshot)
}

/// Returns the specification of a sandbox that is created from the snapshot.
fn from(snapshot: &Snapshot) -> CreateSpec {
    CreateSpec {
        source: SandboxSource::Snapshot(snapshot.id().to_owned()),
        ..base()
    }
}

/// Starts a task that creates a sandbox and returns its id.
fn create(host: &Sandboxes, spec: CreateSpec) -> JoinHandle<Result<String, OperationError>> {
    let host = host.clone();
    tokio::spawn(async move { Ok(host.create(spec).await?.id().to_owned()) })
}

/// Returns the snapshot as lists show it.
fn listed(host: &Sandboxes, id: &str) -> Option<Snapshot> {
    host.snapshots().like(id).pop()
}

#[tokio::test]
async fn a_captured_snapshot_is_visible_at_once_and_creates_wait_for_its_files() {
    let bench = Bench::new();
    let host = bench.open().await;
    let (id, snapshot) = capture(&bench, &host).await;
    assert!(snapshot.is_storing() && snapshot.is_retained());
    // The fake engine reports 7,000 microseconds.
    assert!((snapshot.stopped_ms() - 7.0).abs() < f64::EPSILON);
    assert_eq!(listed(&host, "name"), Some(snapshot.clone()));
    assert!(!bench.files().join(snapshot.id()).exists());

    let child = create(&host, from(&snapshot));
    let error = host.snapshots().remove(snapshot.id()).unwrap_err();
    assert!(matches!(error, OperationError::InUse { .. }), "{error}");
    tokio::task::yield_now().await;
    assert!(!child.is_finished());
    bench.world.storing_waits.send_replace(false);
    let child = child.await.unwrap().unwrap();
    assert_eq!(*bench.world.body(&child).memory.lock().unwrap(), "captured");
    let stored = listed(&host, snapshot.id()).unwrap();
    // The text `captured` has 8 bytes.
    assert!(!stored.is_storing() && stored.bytes() == 8);
    assert_eq!(host.get(&id).unwrap().snapshot(), Some(snapshot.id()));
}

#[tokio::test]
async fn a_captured_snapshot_that_cannot_be_stored_is_lost_with_a_reason() {
    let bench = Bench::new();
    let host = bench.open().await;
    let (id, snapshot) = capture(&bench, &host).await;
    let child = create(&host, from(&snapshot));
    bench.world.fail("store");
    bench.world.storing_waits.send_replace(false);
    let error = child.await.unwrap().unwrap_err();
    assert!(
        matches!(error, OperationError::CaptureLost { .. }),
        "{error}"
    );
    // For clients, a lost snapshot does not exist (404).
    assert_eq!(error.kind(), ErrorKind::Unknown);
    assert!(error.to_string().contains("store was made to fail"));

    assert_eq!(listed(&host, snapshot.id()), None);
    // Only `FetchScope::Requested` compares the owner of the snapshot.
    let check = |owner, scope| {
        let snapshots = host.snapshots();
        snapshots.expect_not_lost(owner, snapshot.id(), scope)
    };
    assert!(check(None, FetchScope::Requested).is_err());
    assert!(check(Some("another"), FetchScope::All).is_err());
    // Other tenants receive no information about the snapshot.
    check(Some("another"), FetchScope::Requested).unwrap();
    bench.world.clear_failures();
    host.snapshot(&id, None).await.unwrap();
}

#[tokio::test]
async fn a_kill_does_not_lose_a_captured_snapshot() {
    let bench = Bench::new();
    let host = bench.open().await;
    let (id, snapshot) = capture(&bench, &host).await;
    let killing = tokio::spawn({
        let (host, id) = (host.clone(), id.clone());
        async move { host.kill(&id).await }
    });
    until("the guest to exit", || !bench.world.running().contains(&id)).await;
    // The kill waits until the snapshot is stored.
    bench.world.storing_waits.send_replace(false);
    let killed = killing.await.unwrap().unwrap();
    assert_eq!(*killed.state(), SandboxState::Killed);
    let child = host.create(from(&snapshot)).await.unwrap().id().to_owned();
    assert_eq!(*bench.world.body(&child).memory.lock().unwrap(), "captured");
    drop(host);
    let host = bench.open().await;
    assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Killed);
    assert!(listed(&host, snapshot.id()).is_some());
}

/// Returns the state after a daemon was killed while it stored a captured snapshot.
fn killed_while_storing() -> (Bench, String, Snapshot) {
    let bench = Bench::new();
    let captured = Arc::new(Mutex::new(None));
    bench.run_and_kill(async {
        let host = bench.open().await;
        *captured.lock().unwrap() = Some(capture(&bench, &host).await);
    });
    let (id, snapshot) = captured.lock().unwrap().take().unwrap();
    (bench, id, snapshot)
}

#[test]
fn the_next_daemon_completes_a_captured_snapshot() {
    let (bench, id, snapshot) = killed_while_storing();
    bench.run_and_kill(async {
        let host = bench.open().await;
        // The snapshot is still in the memory of its guest.
        assert!(listed(&host, snapshot.id()).unwrap().is_storing());
        let child = create(&host, from(&snapshot));
        let pausing = tokio::spawn({
            let (host, id) = (host.clone(), id.clone());
            async move { host.pause(&id).await }
        });
        tokio::task::yield_now().await;
        assert!(!child.is_finished() && !pausing.is_finished());
        bench.world.storing_waits.send_replace(false);
        let child = child.await.unwrap().unwrap();
        assert_eq!(*bench.world.body(&child).memory.lock().unwrap(), "captured");
        pausing.await.unwrap().unwrap();
        assert!(!listed(&host, snapshot.id()).unwrap().is_storing());
    });
    bench.run_and_kill(async {
        let host = bench.open().await;
        assert!(!listed(&host, snapshot.id()).unwrap().is_storing());
        host.resume(&id).await.unwrap();
        assert_eq!(*bench.world.body(&id).memory.lock().unwrap(), "later");
    });
}

#[test]
fn a_captured_snapshot_with_complete_files_survives_a_kill_and_a_crash() {
    let bench = Bench::new();
    let captured = Arc::new(Mutex::new(None));
    bench.run_and_kill(async {
        let host = bench.open().await;
        let (id, snapshot) = capture(&bench, &host).await;
        let kill = {
            let (host, id) = (host.clone(), id.clone());
            async move { host.kill(&id).await }
        };
        tokio::spawn(kill);
        until("the guest to exit", || !bench.world.running().contains(&id)).await;
        bench.world.hang("snapshot-named");
        bench.world.storing_waits.send_replace(false);
        until("the files to be complete", || {
            bench.world.is_stuck("snapshot-named")
        })
        .await;
        *captured.lock().unwrap() = Some(snapshot);
    });
    bench.world.clear_failures();
    let snapshot = captured.lock().unwrap().take().unwrap();
    bench.run_and_kill(async {
        let host = bench.open().await;
        assert!(!listed(&host, snapshot.id()).unwrap().is_storing());
        let child = host.create(from(&snapshot)).await.unwrap().id().to_owned();
        assert_eq!(*bench.world.body(&child).memory.lock().unwrap(), "captured");
    });
}

#[test]
fn a_captured_snapshot_discarded_without_a_daemon_is_lost() {
    let (bench, id, snapshot) = killed_while_storing();
    // The process that held the memory has discarded the snapshot.
    *bench.world.body(&id).captured.lock().unwrap() = None;
    bench.world.storing_waits.send_replace(false);
    bench.run_and_kill(async {
        let host = bench.open().await;
        until("the loss of the snapshot", || {
            listed(&host, snapshot.id()).is_none()
        })
        .await;
        until("the removal of the files", || {
            *bench.world.discarded.lock().unwrap() == [snapshot.id().to_owned()]
        })
        .await;
        // The sandbox continues to run.
        host.snapshot(&id, None).await.unwrap();
    });
}

#[test]
fn a_captured_snapshot_is_lost_if_its_guest_exits_with_the_daemon() {
    let (bench, id, snapshot) = killed_while_storing();
    bench.world.body(&id).stop();
    bench.run_and_kill(async {
        let host = bench.open().await;
        assert!(matches!(
            host.get(&id).unwrap().state(),
            SandboxState::Broken { .. }
        ));
        assert_eq!(listed(&host, snapshot.id()), None);
        let snapshots = host.snapshots();
        let error = snapshots.expect_not_lost(None, snapshot.id(), FetchScope::Requested);
        assert!(matches!(error, Err(OperationError::CaptureLost { .. })));
        assert_eq!(*bench.world.discarded.lock().unwrap(), [snapshot.id()]);
    });
}
