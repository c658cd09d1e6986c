//! Resumes during a forced drain. A *drain* moves all sandboxes of a host to other hosts.

use crate::fake::{Bench, base};
use jiffy_sandbox_manager::{ErrorKind, SandboxState};

#[tokio::test]
async fn a_resume_that_waits_for_the_pause_of_a_drain_leaves_the_sandbox_paused() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = host.create(base()).await.unwrap().id().to_owned();
    let hold = host.hold_resumes();
    // A running sandbox continues.
    assert!(!host.ensure_running(&id).await.unwrap().1);
    // The operations wait for each other in this order.
    let (paused, resumed, used) = tokio::join!(
        host.pause(&id),
        host.resume(&id),
        host.ensure_running_for(&id, Default::default())
    );
    let snapshot = paused.unwrap().snapshot().unwrap().to_owned();
    let rolled_back = host.rollback(&id, &snapshot).await.map(drop);
    for refused in [resumed.map(drop), used.map(drop), rolled_back] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.retry_after().is_some());
        assert!(error.to_string().contains("is being drained"), "{error}");
    }
    assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Paused);
    assert!(bench.world.running().is_empty());
    drop(hold);
    let resumed = host.resume(&id).await.unwrap();
    assert_eq!(*resumed.state(), SandboxState::Running);
}
