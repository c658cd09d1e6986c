//! Push and pull: only missing chunks are transferred, and a pulled snapshot equals the pushed one.
//!
//! A *pack* is an object in the store with many compressed and encrypted chunks. A *lease* is an
//! object that protects the objects of a push in progress.

use crate::support::*;
use jiffy_store::*;
use std::collections::HashSet;
use std::fs;
use std::sync::Arc;

#[tokio::test]
async fn a_snapshot_comes_back_as_it_was_pushed() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir.path(), &[1, 0, 2, 0, 0, 3]);
    let options = PushOptions::new(dir.path().join("index"));
    let (name, report) = store.push(&tenant, &source, &options).await.unwrap();
    // Three chunks of memory, and the chunk of the state.
    assert_eq!((report.chunks, report.new_chunks, report.packs), (4, 4, 1));
    assert_same(&store, &tenant, name.root, &source).await;
    assert_eq!(store.snapshots(&tenant).await.unwrap(), [name.root]);
}

#[tokio::test]
async fn a_push_moves_exactly_the_chunks_that_the_store_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let seeds: Vec<u64> = (1..=300).collect();
    let parent = snapshot(dir.path(), &seeds);
    let (parent, _) = store.push(&tenant, &parent, &options).await.unwrap();
    // Another host, without an index of the parent's packs: 3 chunks differ, 1 of them occurs
    // twice.
    let options = PushOptions::new(dir.path().join("index-of-another"));
    let mut changed = seeds.clone();
    (changed[7], changed[8], changed[200], changed[201]) = (1001, 1002, 1003, 1003);
    let mut source = snapshot(dir.path(), &changed);
    source.lineage = vec![parent];
    let before = store.backend().traffic();
    let (name, report) = store.push(&tenant, &source, &options).await.unwrap();
    let written = store.backend().traffic().bytes_written - before.bytes_written;
    assert_eq!((report.new_chunks, report.new_bytes), (3, 3 * CHUNK as u64));
    // A hash (32 bytes) and a location (12) for each of at most 302 chunks, and 4 KiB for all other
    // data.
    let manifest_and_locations = 302 * (32 + 12) as u64;
    let bound = 3 * CHUNK as u64 + manifest_and_locations + 4096;
    assert!(
        (3 * CHUNK as u64..bound).contains(&written),
        "{written} bytes were written"
    );
    assert_same(&store, &tenant, name.root, &source).await;
    // Pushing the same snapshot again writes only the lease.
    let before = store.backend().traffic();
    let (_, report) = store.push(&tenant, &source, &options).await.unwrap();
    assert!(report.existed);
    let now = store.backend().traffic();
    assert!(now.bytes_written - before.bytes_written < 2048 && now.gets - before.gets < 8);
}

#[tokio::test]
async fn zero_and_inherited_chunks_are_not_uploaded() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let mut source = snapshot(dir.path(), &vec![0; 100_000]);
    let (_, empty) = store.push(&tenant, &source, &options).await.unwrap();
    // The chunk of the state.
    assert_eq!(empty.chunks, 1);
    source = snapshot(dir.path(), &[1, 2, 3, 4]);
    source.parts[0].inherited = vec![0..1, 2..4];
    let (name, report) = store.push(&tenant, &source, &options).await.unwrap();
    assert_eq!(report.new_chunks, 1);
    let remote = store.open(&tenant, name.root).await.unwrap();
    let inherited = remote.manifest.parts[0]
        .ranges(RunKind::Inherited)
        .collect::<Vec<_>>();
    assert_eq!(inherited, [0..1, 2..4]);
}

#[tokio::test]
async fn a_working_set_is_pulled_alone_and_with_few_requests() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let mut source = snapshot(dir.path(), &(1..=400).collect::<Vec<_>>());
    source.working_set = (0..64).map(|at| at * 6).collect();
    let options = PushOptions::new(dir.path().join("index"));
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    let cache = Arc::new(LayerCache::open(dir.path().join("cache"), u64::MAX).unwrap());
    let before = store.backend().traffic();
    let (layer, report) = store
        .pull(&remote, 0, Selection::WorkingSet, &cache)
        .await
        .unwrap();
    let gets = store.backend().traffic().gets - before.gets;
    // 4 MiB of chunks scattered in memory are adjacent in a pack.
    assert_eq!((report.fetched, gets), (64, report.ranges));
    assert!(gets <= 2, "{gets} requests");
    let touched: HashSet<u64> = source
        .working_set
        .iter()
        .map(|&chunk| chunk.into())
        .collect();
    assert!((0..400).all(|chunk| layer.has(chunk) == touched.contains(&chunk)));
    let (_, rest) = store
        .pull(&remote, 0, Selection::All, &cache)
        .await
        .unwrap();
    assert_eq!(rest.fetched, 400 - 64);
    assert!(fs::read(layer.path()).unwrap() == content(&source, 0));
}

#[tokio::test]
async fn a_layer_is_fetched_once_for_all_that_pull_it() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir.path(), &(1..=50).collect::<Vec<_>>());
    let options = PushOptions::new(dir.path().join("index"));
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    // Simulate two processes: each has its own cache object over the same directory.
    let cache = || Arc::new(LayerCache::open(dir.path().join("cache"), u64::MAX).unwrap());
    let (a, b) = (cache(), cache());
    let (first, second) = tokio::join!(
        store.pull(&remote, 0, Selection::All, &a),
        store.pull(&remote, 0, Selection::All, &b)
    );
    assert_eq!(first.unwrap().1.fetched + second.unwrap().1.fetched, 50);
}

#[tokio::test]
async fn the_cache_respects_its_limit_and_retains_used_layers() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let cache = Arc::new(LayerCache::open(dir.path().join("cache"), 25 * CHUNK as u64).unwrap());
    let mut remotes = Vec::new();
    for seed in [1, 100, 200] {
        let source = snapshot(dir.path(), &(seed..seed + 10).collect::<Vec<_>>());
        let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
        remotes.push(store.open(&tenant, name.root).await.unwrap());
    }
    let pull = async |number: usize| {
        store
            .pull(&remotes[number], 0, Selection::All, &cache)
            .await
    };
    // The limit permits two of the three layers, which have 10 chunks each. The second layer is
    // unused when the third one is pulled, so it is evicted.
    let used = pull(0).await.unwrap().0;
    drop(pull(1).await.unwrap());
    let third = pull(2).await.unwrap().0;
    assert!(used.path().exists() && used.has(0));
    assert!(cache.bytes().unwrap() <= 25 * CHUNK as u64);
    // The first and the third layer are in use.
    let full = pull(1).await.unwrap_err();
    assert!(matches!(full, StoreError::CacheFull { .. }), "{full}");
    drop(third);
    assert_eq!(pull(1).await.unwrap().1.fetched, 10);
}

#[tokio::test]
async fn a_clone_of_a_cached_layer_is_equal_and_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir.path(), &[1, 0, 2, 3]);
    let options = PushOptions::new(dir.path().join("index"));
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    let cache = Arc::new(LayerCache::open(dir.path().join("cache"), u64::MAX).unwrap());
    let (layer, _) = store
        .pull(&remote, 0, Selection::All, &cache)
        .await
        .unwrap();
    let to = dir.path().join("clone");
    layer.clone_to(&remote.manifest.parts[0], &to).unwrap();
    assert!(fs::read(&to).unwrap() == content(&source, 0));
    // A clone does not replace an existing file.
    assert!(layer.clone_to(&remote.manifest.parts[0], &to).is_err());
    assert!(fs::read(&to).unwrap() == content(&source, 0));
}

#[tokio::test]
async fn a_tenant_neither_reads_nor_shares_chunks_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let (alice, mallory) = (
        store.tenant("alice").await.unwrap(),
        store.tenant("mallory").await.unwrap(),
    );
    let options = PushOptions::new(dir.path().join("index"));
    let source = snapshot(dir.path(), &[1, 2, 3]);
    let (name, _) = store.push(&alice, &source, &options).await.unwrap();
    let refused = store.open(&mallory, name.root).await.unwrap_err();
    assert!(matches!(refused, StoreError::Missing { .. }), "{refused}");
    // The push does not reveal to her that the store has these chunks.
    let (other, report) = store.push(&mallory, &source, &options).await.unwrap();
    // Three chunks of memory, and the chunk of the state.
    assert_eq!(report.new_chunks, 4);
    assert_ne!(other.root, name.root);
}

#[tokio::test]
async fn a_snapshot_on_a_stock_template_needs_that_template() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let shared = store.tenant(SHARED_TENANT).await.unwrap();
    let alice = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let (template, _) = store
        .push(&shared, &snapshot(dir.path(), &[1]), &options)
        .await
        .unwrap();
    assert_eq!(template.scope, Scope::Shared);
    let mut source = snapshot(dir.path(), &[0, 2]);
    source.lineage = vec![template];
    store.push(&alice, &source, &options).await.unwrap();
    source.lineage[0].root = Hash([1; 32]);
    let refused = store.push(&alice, &source, &options).await.unwrap_err();
    assert!(matches!(refused, StoreError::Gone(_)), "{refused}");
}

#[tokio::test]
async fn an_upload_respects_its_bandwidth_limit() {
    let dir = tempfile::tempdir().unwrap();
    let settings = BackendSettings {
        upload_bytes_per_second: Some(4 << 20),
        ..quick()
    };
    let store = over(Arc::new(object_store::memory::InMemory::new()), settings);
    let tenant = store.tenant("alice").await.unwrap();
    let mut options = PushOptions::new(dir.path().join("index"));
    options.pack_bytes = 1 << 20;
    let source = snapshot(dir.path(), &(1..=64).collect::<Vec<_>>());
    let (_, report) = store.push(&tenant, &source, &options).await.unwrap();
    // 4 MiB at 4 MiB/s, in packs of 1 MiB. The push does not wait for the bandwidth of the last
    // pack.
    assert!(report.seconds > 0.6, "{} s", report.seconds);
}
