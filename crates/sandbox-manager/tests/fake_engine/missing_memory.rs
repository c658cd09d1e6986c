//! Sandboxes whose guest exited because memory did not arrive from the store in time.

use crate::fake::{Bench, create_id, snapshot_id, until};
use jiffy_sandbox_manager::{ErrorKind, SandboxState, Sandboxes};

/// Waits until the sandbox is broken.
async fn wait_broken(host: &Sandboxes, id: &str) {
    until("the exit to be noticed", || {
        matches!(host.get(id).unwrap().state(), SandboxState::Broken { .. })
    })
    .await;
}

#[tokio::test]
async fn a_sandbox_broken_by_missing_memory_resumes_from_its_latest_snapshot() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    bench.world.write(&id, "first");
    host.snapshot(&id, None).await.unwrap();
    bench.world.write(&id, "second");
    let latest = snapshot_id(&host, &id).await;
    bench.world.write(&id, "lost");
    bench.world.starve_guest(&id);
    wait_broken(&host, &id).await;
    let error = host.pause(&id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    let error = error.to_string();
    assert!(
        error.contains("its store did not answer") && error.contains("resume it"),
        "{error}"
    );
    // While the restore fails, the sandbox remains broken and has no reservation.
    bench.world.fail("restore");
    host.resume(&id).await.unwrap_err();
    assert!(host.get(&id).unwrap().state().is_broken_and_resumable());
    assert_eq!(host.figures().reservations().sandboxes, 0);
    bench.world.clear_failures();
    let resumed = host.resume(&id).await.unwrap();
    assert_eq!(*resumed.state(), SandboxState::Running);
    assert_eq!(resumed.snapshot(), Some(latest.as_str()));
    assert_eq!(bench.world.read(&id), "second");
    // A guest has already run from this snapshot, so its connections must be closed.
    let body = bench.world.body(&id);
    assert!(body.sandbox_identity.lock().unwrap().rewound);
}

#[tokio::test]
async fn a_sandbox_broken_by_missing_memory_resumes_with_the_next_daemon() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    bench.world.write(&id, "text");
    host.snapshot(&id, None).await.unwrap();
    bench.world.starve_guest(&id);
    wait_broken(&host, &id).await;
    drop(host);
    let host = bench.open().await;
    assert!(host.get(&id).unwrap().state().is_broken_and_resumable());
    let (now, was_resumed) = host.ensure_running(&id).await.unwrap();
    assert_eq!((now.state(), was_resumed), (&SandboxState::Running, true));
    assert_eq!(bench.world.read(&id), "text");
}

#[tokio::test]
async fn a_sandbox_broken_for_another_reason_is_not_resumed() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    host.snapshot(&id, None).await.unwrap();
    bench.world.panic_guest(&id);
    wait_broken(&host, &id).await;
    let error = host.resume(&id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    let error = error.to_string();
    assert!(
        error.ends_with("; roll it back to a snapshot, or kill it"),
        "{error}"
    );
}
