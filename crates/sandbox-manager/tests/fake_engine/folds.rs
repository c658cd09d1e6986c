//! Folds: a removed snapshot is folded into its only child unless it is in use. The fold merges its
//! files into the files of the child.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.

use crate::fake;

use fake::{Bench, create_id, snapshot_id, until};
use jiffy_sandbox_manager::{HostOptions, Sandboxes};
use std::sync::atomic::Ordering;
use std::time::Duration;

async fn open(bench: &Bench) -> Sandboxes {
    bench.world.folds_snapshots.store(true, Ordering::Relaxed);
    let options = HostOptions {
        upkeep_interval: Duration::from_millis(5),
        gc_interval: Duration::from_millis(20),
        ..HostOptions::default()
    };
    bench.open_with(options).await
}

/// Creates a sandbox and its snapshots, oldest first.
async fn sandbox(host: &Sandboxes, snapshots: usize) -> (String, Vec<String>) {
    let id = create_id(host).await;
    let mut ids = Vec::new();
    for _ in 0..snapshots {
        ids.push(snapshot_id(host, &id).await);
    }
    (id, ids)
}

/// Returns the folds that the engine has executed.
fn folds(bench: &Bench) -> Vec<(String, String)> {
    bench.world.folds.lock().unwrap().clone()
}

#[tokio::test]
async fn removed_snapshots_are_folded_while_their_sandbox_runs() {
    let bench = Bench::new();
    let host = open(&bench).await;
    let (id, taken) = sandbox(&host, 5).await;
    bench.world.write(&id, "text");
    let sizes_read = bench.world.measured_by.lock().unwrap().len();
    // Removes the first, third and fourth snapshot, and not the second.
    for removed in [0, 2, 3] {
        host.snapshots().remove(&taken[removed]).unwrap();
    }
    let exists = |id: &str| bench.files().join(id).exists();
    until("the removal of three files", || {
        [0, 2, 3].iter().all(|at| !exists(&taken[*at]))
    })
    .await;
    assert!(exists(&taken[1]) && exists(&taken[4]));
    let ids: Vec<_> = host.snapshots().list(None).unwrap();
    assert!(
        [0, 2, 3]
            .iter()
            .all(|at| ids.iter().all(|s| s.id() != taken[*at]))
    );
    let newest = ids.iter().find(|s| s.id() == taken[4]).unwrap();
    assert_eq!(newest.parent(), Some(&*taken[1]));
    let folds = folds(&bench);
    assert!(
        folds.contains(&(taken[0].clone(), taken[1].clone())),
        "{folds:?}"
    );
    // The snapshot of the template is not folded.
    assert_eq!(folds.len(), 3, "{folds:?}");
    // The guest closes its files for each fold.
    until("the guest to be notified", || {
        *bench.world.notified_folds.lock().unwrap() == ["text", "text", "text"]
    })
    .await;
    until("new sizes", || {
        bench.world.measured_by.lock().unwrap().len() > sizes_read
    })
    .await;

    bench.world.supports_rollback.store(true, Ordering::Relaxed);
    host.rollback(&id, &taken[1]).await.unwrap();
    host.pause(&id).await.unwrap();
    host.resume(&id).await.unwrap();
    assert_eq!(bench.world.running(), [id]);
}

#[tokio::test]
async fn a_snapshot_in_use_is_not_folded() {
    let bench = Bench::new();
    let host = open(&bench).await;
    let (id, taken) = sandbox(&host, 3).await;
    // The fork and two snapshots use the lineage.
    let forked = host.fork(&id, 1, None).await.unwrap().children.remove(0);
    let forked = forked.unwrap();
    host.snapshots().remove(&taken[2]).unwrap();
    // Wait for several rounds of garbage collection, which must retain snapshots in use.
    until("gc", || *bench.world.gc_runs.lock().unwrap() > 3).await;
    // The fork's snapshot depends on the third snapshot and is in use, so the third snapshot is
    // folded into the fork's snapshot.
    let fork = forked.snapshot().unwrap().to_owned();
    until("a fold", || {
        folds(&bench) == [(taken[2].clone(), fork.clone())]
    })
    .await;
    let other = snapshot_id(&host, &id).await;
    let sibling = host
        .snapshot(forked.id(), None)
        .await
        .unwrap()
        .id()
        .to_owned();
    // The fork's snapshot is unused now, but two snapshots depend on it.
    let gc_runs = *bench.world.gc_runs.lock().unwrap();
    until("gc", || *bench.world.gc_runs.lock().unwrap() > gc_runs + 3).await;
    assert_eq!(folds(&bench).len(), 1);
    assert!(bench.files().join(&fork).exists());
    // Only one snapshot depends on it afterwards.
    host.kill(forked.id()).await.unwrap();
    host.snapshots().remove(&sibling).unwrap();
    until("a fold", || {
        folds(&bench).last() == Some(&(fork.clone(), other.clone()))
    })
    .await;
}

#[tokio::test]
async fn the_next_daemon_completes_an_interrupted_fold() {
    let bench = Bench::new();
    let host = open(&bench).await;
    let (id, taken) = sandbox(&host, 2).await;
    bench.world.write(&id, "text");
    bench.world.fail("fold-commit");
    host.snapshots().remove(&taken[0]).unwrap();
    // The record is removed before the files, and the files remain.
    let is_removed = || {
        let all = host.snapshots().list(None).unwrap();
        all.iter().all(|snapshot| snapshot.id() != taken[0])
    };
    until("the removal of the record", is_removed).await;
    assert!(folds(&bench).is_empty() && bench.files().join(&taken[0]).exists());
    host.close().await;
    drop(host);

    bench.world.clear_failures();
    let host = open(&bench).await;
    until("the removal of the file", || {
        !bench.files().join(&taken[0]).exists()
    })
    .await;
    assert_eq!(folds(&bench), [(taken[0].clone(), taken[1].clone())]);
    host.pause(&id).await.unwrap();
    host.resume(&id).await.unwrap();
    assert_eq!(bench.world.read(&id), "text");
}

#[tokio::test]
async fn an_expensive_fold_is_retried_for_the_last_snapshot_only() {
    let bench = Bench::new();
    let host = open(&bench).await;
    let (_, taken) = sandbox(&host, 4).await;
    // Folds with the small limit of the first try are rejected. Only a retry may copy more.
    bench.world.fail("small-fold");
    for removed in &taken[..3] {
        host.snapshots().remove(removed).unwrap();
    }
    // All are folded into the last snapshot, and none into a snapshot that is itself removed.
    until("three folds", || folds(&bench).len() == 3).await;
    assert!(folds(&bench).iter().all(|(_, into)| *into == taken[3]));
    until("the removal of three files", || {
        taken[..3].iter().all(|id| !bench.files().join(id).exists())
    })
    .await;
}
