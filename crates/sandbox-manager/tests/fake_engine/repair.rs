//! Repair of snapshots whose files are damaged on the host and intact in the store.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.

use crate::fake::{Bench, DAMAGED, base, create_id};
use crate::uploads::{TestStore, figure, noise, stored};
use jiffy_sandbox_manager::{CreateSpec, ErrorKind, SandboxSource, SandboxState, Sandboxes};
use std::fs;

/// Metric: snapshots whose damaged files were replaced by their copy in the store.
const REPAIRED: &str = "jiffy_store_mended_snapshots_total{outcome=\"ok\"}";
/// Metric: snapshots that could not be replaced by a copy in the store.
const NOT_REPAIRED: &str = "jiffy_store_mended_snapshots_total{outcome=\"failed\"}";

fn from(snapshot: &str) -> CreateSpec {
    CreateSpec {
        source: SandboxSource::Snapshot(snapshot.to_owned()),
        ..base()
    }
}

/// Creates a sandbox with `text` in its memory and takes a snapshot. Returns the ids of both.
async fn taken(bench: &Bench, host: &Sandboxes, text: &str) -> (String, String) {
    let id = create_id(host).await;
    bench.world.write(&id, text);
    let snapshot = host
        .snapshot(&id, Some("name".into()))
        .await
        .unwrap()
        .id()
        .to_owned();
    (id, snapshot)
}

#[tokio::test]
async fn concurrent_repairs_share_one_fetch_of_a_damaged_snapshot() {
    let (bench, store, text) = (Bench::new(), TestStore::new(), noise(7, 300_000));
    let host = bench.open_with(store.options("one", None)).await;
    let (id, snapshot) = taken(&bench, &host, &text).await;
    stored(&host, &snapshot).await;
    let before = host.snapshots().list(None).unwrap();
    fs::write(bench.files().join(&snapshot), DAMAGED).unwrap();
    let create = |_| {
        let (host, spec) = (host.clone(), from(&snapshot));
        tokio::spawn(async move { host.create(spec).await })
    };
    for sandbox in (0..6).map(create).collect::<Vec<_>>() {
        let sandbox = sandbox.await.unwrap().unwrap();
        assert!(bench.world.read(sandbox.id()).ends_with(&text));
    }
    assert_eq!(figure(&host, REPAIRED), 1.0);
    // The record of the snapshot, with its name and retention, is unchanged.
    let after = host.snapshots().list(None).unwrap();
    assert_eq!(before, after);
    // A whole lineage is repaired, also for a running sandbox that descends from it.
    for name in bench.file_names() {
        fs::remove_file(bench.files().join(name)).unwrap();
    }
    host.rollback(&id, &snapshot).await.unwrap();
    assert_eq!(bench.world.read(&id), text);
    assert_eq!(figure(&host, NOT_REPAIRED), 0.0);
    host.pause(&id).await.unwrap();
}

#[tokio::test]
async fn a_damaged_snapshot_without_a_copy_is_rejected() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let host = bench.open().await;
    let (id, snapshot) = taken(&bench, &host, "text").await;
    fs::write(bench.files().join(&snapshot), DAMAGED).unwrap();
    let error = host.create(from(&snapshot)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Failed);
    assert!(error.to_string().contains("it is damaged"), "{error}");
    drop(host);
    // The result is the same with a store that lacks the snapshot.
    let options = store.options("one", None);
    store.make_unreachable();
    let host = bench.open_with(options).await;
    let error = host.create(from(&snapshot)).await.unwrap_err();
    // The store may have the snapshot, so a retry is worthwhile.
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    store.make_reachable();
    let error = host.create(from(&snapshot)).await.unwrap_err();
    assert!(error.to_string().contains("it is damaged"), "{error}");
    // Both creates on the host with the store count as failed repairs.
    assert_eq!(figure(&host, NOT_REPAIRED), 2.0);
    assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Running);
}

#[tokio::test]
async fn a_failure_without_damage_fetches_nothing() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let host = bench.open_with(store.options("one", None)).await;
    let (_, snapshot) = taken(&bench, &host, "text").await;
    stored(&host, &snapshot).await;
    bench.world.fail("restore");
    let error = host.create(from(&snapshot)).await.unwrap_err();
    assert!(error.to_string().contains("made to fail"), "{error}");
    assert_eq!(figure(&host, REPAIRED) + figure(&host, NOT_REPAIRED), 0.0);
}
