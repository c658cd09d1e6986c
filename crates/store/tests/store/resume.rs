//! Resume bundles: one request brings a lineage and the chunks that a guest reads first. A missing
//! or damaged bundle costs requests only.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.
//!
//! A *pack* is an object in the store with many compressed and encrypted chunks. The *resume
//! bundle* of a snapshot is an object with copies of the content that a host reads first to resume
//! it.

use crate::support::*;
use jiffy_store::*;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Options without a grace period: a first collection condemns unused objects, and a second one
/// removes them.
const AT_ONCE: GcOptions = GcOptions {
    grace: Duration::ZERO,
    lock_time: Duration::from_secs(3600),
    reader_time: READER_TIME,
    repack_percent: 50,
    repack_bytes: 1 << 30,
    dry_run: false,
};

/// Store with a paused sandbox: a template of all tenants, and two snapshots on it.
struct Paused {
    dir: tempfile::TempDir,
    store: SharedStore,
    tenant: Arc<Tenant>,
    shared: Arc<Tenant>,
    names: Vec<SnapshotName>,
    sources: Vec<SnapshotSource>,
}

impl Paused {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (_, store) = in_memory();
        let shared = store.tenant(SHARED_TENANT).await.unwrap();
        let tenant = store.tenant("alice").await.unwrap();
        let mut paused = Self {
            dir,
            store,
            tenant,
            shared,
            names: Vec::new(),
            sources: Vec::new(),
        };
        // Chunk 0 of the memory is in the template, 1 in the first pause, 2 in the second one.
        paused
            .push(&paused.shared.clone(), &[1, 2, 3, 4], &[])
            .await;
        paused
            .push(&paused.tenant.clone(), &[0, 5, 6, 0], &[1, 0])
            .await;
        paused
            .push(&paused.tenant.clone(), &[0, 0, 7, 8], &[2, 1, 0])
            .await;
        paused
    }

    /// Pushes a snapshot that is based on the previous ones. Chunks with the seed 0 are inherited.
    async fn push(&mut self, tenant: &Arc<Tenant>, seeds: &[u64], working_set: &[u32]) {
        let mut source = snapshot(self.dir.path(), seeds);
        source.lineage = self.names.clone();
        source.working_set = working_set.to_vec();
        source.attributes.id = format!("s{}", self.names.len());
        let zero = seeds.iter().enumerate().filter(|(_, seed)| **seed == 0);
        source.parts[0].inherited = zero.map(|(at, _)| at as u64..at as u64 + 1).collect();
        let options = PushOptions::new(self.dir.path().join("index"));
        let (name, _) = self.store.push(tenant, &source, &options).await.unwrap();
        self.names.insert(0, name);
        self.sources.insert(0, source);
    }

    fn root(&self) -> Hash {
        self.names[0].root
    }

    /// Writes the bundle of the newest snapshot. Returns its size in bytes.
    async fn write(&self) -> Option<u64> {
        let writing = self.store.write_resume_bundle(&self.tenant, self.root());
        writing.await.unwrap()
    }

    /// Reads the bundle of the newest snapshot into `cache`. `None` if it is missing or damaged.
    async fn read(&self, cache: &Arc<LayerCache>) -> Option<Vec<RemoteSnapshot>> {
        let shared = Some(&self.shared);
        let reading = self
            .store
            .resume_bundle(&self.tenant, shared, self.root(), cache);
        let lineage = reading.await.unwrap()?;
        Some(lineage.into_iter().map(|(snapshot, _)| snapshot).collect())
    }

    /// Returns the key of the bundle.
    async fn key(&self) -> String {
        let listed = self.store.backend().list("").await.unwrap();
        let mut found = listed
            .iter()
            .filter(|object| object.key.contains("/resume/"));
        found.next().unwrap().key.clone()
    }
}

fn cache(dir: &Path, name: &str) -> Arc<LayerCache> {
    Arc::new(LayerCache::open(dir.join(name), u64::MAX).unwrap())
}

#[tokio::test]
async fn one_request_brings_a_lineage_and_its_first_chunks() {
    let paused = Paused::new().await;
    let bytes = paused.write().await.unwrap();
    let cache = cache(paused.dir.path(), "cache");
    let before = paused.store.backend().traffic();
    let lineage = paused.read(&cache).await.unwrap();
    let roots: Vec<Hash> = lineage.iter().map(|snapshot| snapshot.root).collect();
    let names: Vec<Hash> = paused.names.iter().map(|name| name.root).collect();
    assert_eq!(roots, names);
    // The nearest layer with a chunk provides it. States are complete.
    for (snapshot, chunks) in lineage.iter().zip([&[2][..], &[1], &[0]]) {
        let (memory, report) = (paused.store)
            .pull(
                snapshot,
                0,
                Selection::Chunks(&chunks.iter().map(|&at| at as u64).collect::<Vec<_>>()),
                &cache,
            )
            .await
            .unwrap();
        assert_eq!((report.chunks, report.fetched), (1, 0));
        assert_eq!((0..4).filter(|&at| memory.has(at)).count(), 1);
        let (_, report) = (paused.store)
            .pull(snapshot, 1, Selection::All, &cache)
            .await
            .unwrap();
        assert_eq!((report.chunks, report.fetched), (1, 0));
    }
    let now = paused.store.backend().traffic();
    assert_eq!(
        (now.gets - before.gets, now.heads, now.lists),
        (1, before.heads, before.lists)
    );
    assert_eq!(now.bytes_read - before.bytes_read, bytes);
    // The other chunks come from packs.
    for (snapshot, source) in lineage.iter().zip(&paused.sources) {
        let (layer, _) = (paused.store)
            .pull(snapshot, 0, Selection::All, &cache)
            .await
            .unwrap();
        assert!(std::fs::read(layer.path()).unwrap() == content(source, 0));
    }
}

#[tokio::test]
async fn a_missing_damaged_or_foreign_bundle_is_ignored() {
    let paused = Paused::new().await;
    let cache = cache(paused.dir.path(), "cache");
    assert!(paused.read(&cache).await.is_none());
    paused.write().await.unwrap();
    let backend = paused.store.backend();
    let key = paused.key().await;
    let sound = backend.get(&key, u64::MAX).await.unwrap();
    // Damaged and truncated in the header, the middle and the end.
    for at in [0, 9, 20, 40, 70, sound.len() / 2, sound.len() - 1] {
        let mut damaged = sound.to_vec();
        damaged[at] ^= 1;
        backend.put(&key, damaged.into()).await.unwrap();
        assert!(paused.read(&cache).await.is_none(), "byte {at}");
        backend.put(&key, sound.slice(..at)).await.unwrap();
        assert!(paused.read(&cache).await.is_none(), "{at} bytes");
    }
    // Too large.
    backend.put(&key, vec![0; 40 << 20].into()).await.unwrap();
    assert!(paused.read(&cache).await.is_none());
    // The bundle of another snapshot of the tenant.
    let other = paused.names[1].root;
    let writing = paused.store.write_resume_bundle(&paused.tenant, other);
    writing.await.unwrap().unwrap();
    let foreign = key.replace(&paused.root().to_string(), &other.to_string());
    let foreign = backend.get(&foreign, u64::MAX).await.unwrap();
    backend.put(&key, foreign).await.unwrap();
    assert!(paused.read(&cache).await.is_none());
    backend.put(&key, sound).await.unwrap();
    assert!(paused.read(&cache).await.is_some());
}

#[tokio::test]
async fn chunks_that_were_moved_since_a_bundle_was_written_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let big = snapshot(dir.path(), &(1..=16).collect::<Vec<_>>());
    let (big, _) = store.push(&tenant, &big, &options).await.unwrap();
    let source = snapshot(dir.path(), &[3, 0, 14, 20]);
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    store.write_resume_bundle(&tenant, name.root).await.unwrap();
    store.remove(&tenant, big.root).await.unwrap();
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(3)).await;
        store.collect(&tenant, AT_ONCE).await.unwrap();
    }
    let cache = cache(dir.path(), "cache");
    let reading = store.resume_bundle(&tenant, None, name.root, &cache);
    let lineage = reading.await.unwrap().unwrap();
    let lineage: Vec<RemoteSnapshot> = lineage.into_iter().map(|(found, _)| found).collect();
    let now = store.open(&tenant, name.root).await.unwrap();
    assert_ne!(lineage[0].locations, now.locations);
    // Remove the chunks of the bundle from the cache, so that all come from packs.
    let part = lineage[0].part_root(0).unwrap();
    assert!(cache.forget(&part).unwrap());
    let (layer, _) = (store.pull(&lineage[0], 0, Selection::All, &cache).await).unwrap();
    assert!(std::fs::read(layer.path()).unwrap() == content(&source, 0));
}

#[tokio::test]
async fn a_bundle_is_removed_together_with_its_snapshot() {
    let paused = Paused::new().await;
    paused.write().await.unwrap();
    let bundles = async || {
        let listed = paused.store.backend().list("").await.unwrap();
        listed
            .iter()
            .filter(|object| object.key.contains("/resume/"))
            .count()
    };
    // First nothing is removed, and then the newest snapshot.
    for removed in [0, 1] {
        for name in paused
            .names
            .iter()
            .filter(|name| name.scope == Scope::Tenant)
            .take(removed)
        {
            paused
                .store
                .remove(&paused.tenant, name.root)
                .await
                .unwrap();
        }
        for _ in 0..2 {
            tokio::time::sleep(Duration::from_millis(3)).await;
            paused.store.collect(&paused.tenant, AT_ONCE).await.unwrap();
        }
        assert_eq!(bundles().await, 1 - removed);
    }
    let parent = paused.names[1].root;
    assert_same(&paused.store, &paused.tenant, parent, &paused.sources[1]).await;
}
