//! Removal of sandboxes and snapshots: the cost depends on the removed snapshots only, and no call
//! waits for files or for stopping guests.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.

use crate::fake;

use fake::{Bench, base, create_id, snapshot_id, until};
use jiffy_sandbox_manager::{
    FabricatedJournal, FabricatedSnapshot, OperationError, SandboxState, Sandboxes,
};
use std::time::Duration;

/// Creates snapshots as an earlier daemon would have left them. The first one is the parent of all
/// others.
fn fabricate(bench: &Bench, number: usize) {
    let journal = FabricatedJournal::open(&bench.dir.path().join("state.db")).unwrap();
    let snapshots = (0..number).map(|n| FabricatedSnapshot {
        id: format!("made{n:04}"),
        sandbox: "removed".to_owned(),
        template: "base".to_owned(),
        parent: (n > 0).then(|| "made0000".to_owned()),
        created_ms: 1,
        ..FabricatedSnapshot::default()
    });
    for snapshot in snapshots.clone() {
        std::fs::write(bench.files().join(&snapshot.id), "made").unwrap();
    }
    journal.add(snapshots, []).unwrap();
}

/// Returns the numbers of queries to the engine and of removed files while a paused sandbox is
/// killed and a snapshot removed.
async fn cost(others: usize) -> (usize, usize) {
    let bench = Bench::new();
    fabricate(&bench, others);
    let host = bench.open().await;
    assert_eq!(host.snapshots().count(), others);
    let id = create_id(&host).await;
    let requested = snapshot_id(&host, &id).await;
    host.pause(&id).await.unwrap();
    // Wait until garbage collection has walked over all snapshots, so that only the two calls below
    // are counted. The template, the request and the pause have created three further snapshots.
    until("the first pass of gc", || {
        *bench.world.walked.lock().unwrap() >= others + 3
    })
    .await;
    assert_eq!(bench.file_names().len(), others + 3);
    let before = *bench.world.independence_queries.lock().unwrap();
    host.kill(&id).await.unwrap();
    host.snapshots().remove(&requested).unwrap();
    let queries = *bench.world.independence_queries.lock().unwrap() - before;
    bench.until_files(others + 1).await;
    let removed = bench.world.removed.lock().unwrap().len();
    (queries, removed)
}

#[tokio::test]
async fn the_cost_of_a_removal_does_not_depend_on_other_snapshots() {
    let few = cost(10).await;
    assert_eq!(few, cost(1000).await);
    assert_eq!(few.1, 2, "files of the pause and of the requested snapshot");
}

#[tokio::test]
async fn a_removal_does_not_wait_for_files_which_are_removed_later() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    host.pause(&id).await.unwrap();
    bench.world.hang("remove");
    host.remove(&id).await.unwrap();
    // Only the record of the template's snapshot remains. The file of the pause snapshot still
    // exists.
    assert_eq!((host.snapshots().count(), bench.file_names().len()), (1, 2));
    bench.world.clear_failures();
    bench.until_files(1).await;
}

#[tokio::test]
async fn waiting_for_removed_files_is_bounded() {
    let bench = Bench::new();
    let host = bench.open().await;
    let remove_paused = async || {
        let id = create_id(&host).await;
        host.pause(&id).await.unwrap();
        bench.world.hang("remove");
        host.remove(&id).await.unwrap();
    };
    remove_paused().await;
    let waiting = host.snapshots().removed_files();
    let waiting = tokio::time::timeout(Duration::from_millis(100), waiting);
    waiting.await.expect_err("the files cannot be removed yet");
    assert_eq!(bench.file_names().len(), 2);
    bench.world.clear_failures();
    host.snapshots().removed_files().await;
    assert_eq!(bench.file_names().len(), 1);

    // Files that stay in use do not delay the caller for longer than a limit.
    remove_paused().await;
    let waiting = host.snapshots().removed_files();
    let waiting = tokio::time::timeout(Duration::from_secs(20), waiting);
    waiting.await.expect("the wait is limited");
    assert_eq!(bench.file_names().len(), 2);
}

#[tokio::test]
async fn a_daemon_serves_before_orphaned_files_are_removed() {
    let bench = Bench::new();
    let host = bench.open().await;
    host.create(base()).await.unwrap();
    drop(host);
    bench.world.hang("remove");
    for number in 0..1000 {
        std::fs::write(bench.files().join(format!("orphan{number}")), "x").unwrap();
    }
    let host = bench.open().await;
    host.create(base()).await.unwrap();
    assert_eq!(bench.file_names().len(), 1001);
    bench.world.clear_failures();
    // The background task may have removed some of the orphaned files already.
    assert!(host.gc().unwrap() <= 1000);
    bench.until_files(1).await;
}

#[tokio::test]
async fn a_merged_snapshot_replaces_its_removed_parent_in_the_lineage() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let template = host.get(&id).unwrap().snapshot().unwrap().to_owned();
    let first = snapshot_id(&host, &id).await;
    let second = snapshot_id(&host, &id).await;
    host.snapshots().remove(&first).unwrap();
    let parent = |host: &Sandboxes| {
        let snapshots = host.snapshots().like(&second);
        snapshots[0].parent().map(str::to_owned)
    };
    assert_eq!(parent(&host), Some(first.clone()));
    bench.world.merged.lock().unwrap().insert(second.clone());
    host.gc().unwrap();
    assert_eq!(parent(&host), Some(template.clone()));
    until("the removal of the files", || {
        !bench.file_names().contains(&first)
    })
    .await;
    // The next daemon has the same parent.
    drop(host);
    let host = bench.open().await;
    assert_eq!(parent(&host), Some(template.clone()));
    assert_eq!(host.snapshots().list(Some(&id)).unwrap().len(), 2);
    let result = host.snapshots().remove(&template);
    assert!(matches!(result, Err(OperationError::InUse { .. })));
}

#[tokio::test]
async fn a_lineage_of_many_pauses_is_merged_in_the_background() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    // The lineage consists of the template's snapshot and one of each pause. A lineage of more than
    // ten snapshots is merged.
    for _ in 0..9 {
        host.pause(&id).await.unwrap();
        host.resume(&id).await.unwrap();
    }
    let merged = || bench.world.merged.lock().unwrap().clone();
    assert!(merged().is_empty());
    let snapshot = host
        .pause(&id)
        .await
        .unwrap()
        .snapshot()
        .unwrap()
        .to_owned();
    until("the lineage to be merged", || merged().contains(&snapshot)).await;
    assert_eq!(merged().len(), 1);
    host.resume(&id).await.unwrap();
}

#[tokio::test]
async fn kills_and_pauses_do_not_wait_for_stopping_guests_but_a_shutdown_does() {
    let bench = Bench::new();
    let host = bench.open().await;
    let (killed, paused) = (create_id(&host).await, create_id(&host).await);
    bench.world.hang("stop");
    host.kill(&killed).await.unwrap();
    host.pause(&paused).await.unwrap();
    assert!(bench.world.running().is_empty());
    assert_eq!(*host.get(&killed).unwrap().state(), SandboxState::Killed);
    assert_eq!(*host.get(&paused).unwrap().state(), SandboxState::Paused);
    // The processes of both guests have not stopped yet, so the shutdown is incomplete.
    assert!(!host.finish(Duration::from_millis(20)).await);
}

#[tokio::test]
async fn a_shutdown_ends_when_killed_guests_have_stopped() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    host.kill(&id).await.unwrap();
    assert!(host.finish(Duration::from_secs(60)).await);
}

#[tokio::test]
async fn a_second_kill_does_not_change_the_time_of_the_end() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let ended = host.kill(&id).await.unwrap().changed_ms();
    until("the next millisecond", || {
        jiffy_engine_api::now_ms() > ended + 1
    })
    .await;
    assert_eq!(host.kill(&id).await.unwrap().changed_ms(), ended);
}
