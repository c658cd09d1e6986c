//! Packs that are mostly dead are repacked, and live chunks are readable at every step.
//!
//! A *pack* is an object that contains chunks of snapshots. A chunk is *live* if a snapshot uses
//! it, and *dead* otherwise. To repack is to copy the live chunks of packs to a new pack.
//! The *locations* of a snapshot are the object that lists the packs and offsets of its chunks. A
//! collection *condemns* an unused object, and a later collection removes it.

use crate::support::*;
use jiffy_store::*;
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

/// Waits until the store's clock, which has a resolution of milliseconds, has advanced.
async fn tick() {
    tokio::time::sleep(Duration::from_millis(3)).await;
}

/// Creates a store with one large pack that is mostly dead: the retained snapshot uses two of its
/// 16 chunks of memory, and its chunk of the state.
async fn mostly_dead(
    store: &SharedStore,
    tenant: &Arc<Tenant>,
    dir: &std::path::Path,
) -> (Hash, SnapshotSource) {
    let options = PushOptions::new(dir.join("index"));
    let big = snapshot(dir, &(1..=16).collect::<Vec<_>>());
    let (gone, _) = store.push(tenant, &big, &options).await.unwrap();
    let source = snapshot(dir, &[3, 0, 14, 20]);
    let (kept, _) = store.push(tenant, &source, &options).await.unwrap();
    store.remove(tenant, gone.root).await.unwrap();
    (kept.root, source)
}

#[tokio::test]
async fn a_pack_that_is_mostly_dead_is_rewritten_and_then_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let (root, source) = mostly_dead(&store, &tenant, dir.path()).await;
    tick().await;
    let dry = GcOptions {
        dry_run: true,
        ..AT_ONCE
    };
    let would = store.collect(&tenant, dry).await.unwrap();
    // The manifest and the locations of the removed snapshot.
    assert_eq!((would.repacked, would.condemned, would.removed), (1, 2, 0));
    tick().await;
    let first = store.collect(&tenant, AT_ONCE).await.unwrap();
    assert_eq!((first.repacked, first.removed), (1, 0));
    // Two of 16 chunks of memory were live, and the chunk of the state.
    assert!(
        first.rewritten_bytes * 3 < first.repacked_bytes,
        "{first:?}"
    );
    assert_same(&store, &tenant, root, &source).await;
    tick().await;
    let second = store.collect(&tenant, AT_ONCE).await.unwrap();
    // The manifest, the locations and the rewritten pack.
    assert_eq!((second.repacked, second.removed), (0, 3));
    assert_same(&store, &tenant, root, &source).await;
    tick().await;
    let third = store.collect(&tenant, AT_ONCE).await.unwrap();
    assert_eq!((third.repacked, third.removed, third.condemned), (0, 0, 0));
    let usage = store.chunk_usage(&tenant, &|_, _, _| {}).await.unwrap();
    let stats = store.stats(&tenant).await.unwrap();
    // The pack of the retained snapshot, and the pack with the chunks that were live.
    assert_eq!((usage.chunks, stats.packs), (4, 2));
    // The headers and indexes of both packs have less than 2000 bytes.
    assert!(stats.pack_bytes < usage.stored_bytes + 2000, "{stats:?}");
}

/// A host exits at each request of two collections that repack.
#[tokio::test]
async fn an_interrupted_rewrite_loses_no_chunk() {
    for at in 0..90 {
        let dir = tempfile::tempdir().unwrap();
        let inner: Arc<dyn object_store::ObjectStore> =
            Arc::new(object_store::memory::InMemory::new());
        let faulty = FaultyStore::new(inner.clone());
        let (collecting, other) = (over(faulty.clone(), quick()), over(inner, quick()));
        let tenant = other.tenant("alice").await.unwrap();
        let (root, source) = mostly_dead(&other, &tenant, dir.path()).await;
        faulty.die_at(at);
        let both = async {
            for _ in 0..2 {
                tick().await;
                collecting.collect(&tenant, AT_ONCE).await?;
            }
            Ok::<_, StoreError>(())
        };
        let died = faulty.until_death(both).await.is_none();
        assert_same(&other, &tenant, root, &source).await;
        // Another host pushes a snapshot that reuses the same chunks, then completes the repacking.
        let options = PushOptions::new(dir.path().join("other-index"));
        let more = snapshot(dir.path(), &[14, 30]);
        let (pushed, _) = other.push(&tenant, &more, &options).await.unwrap();
        let options = GcOptions {
            lock_time: Duration::ZERO,
            ..AT_ONCE
        };
        for _ in 0..4 {
            tick().await;
            other.collect(&tenant, options).await.unwrap();
        }
        assert_same(&other, &tenant, root, &source).await;
        assert_same(&other, &tenant, pushed.root, &more).await;
        let stats = other.stats(&tenant).await.unwrap();
        assert_eq!(stats.condemned, 0);
        // A pack of which less than half is dead (`repack_percent`) is not repacked. 4000 bytes
        // suffice for headers and indexes.
        let usage = other.chunk_usage(&tenant, &|_, _, _| {}).await.unwrap();
        assert!(
            stats.pack_bytes < usage.stored_bytes * 2 + 4000,
            "{stats:?}"
        );
        if !died {
            // With fewer requests, the collections would not have repacked.
            assert!(at > 30, "{at} requests");
            return;
        }
    }
    panic!("the collection never ended");
}

/// Between any two requests of a repacking collection, another host pushes a snapshot that reuses
/// the chunks.
#[tokio::test]
async fn pushes_between_any_two_requests_of_a_rewrite_stay_whole() {
    for at in 0..60 {
        let dir = tempfile::tempdir().unwrap();
        let inner: Arc<dyn object_store::ObjectStore> =
            Arc::new(object_store::memory::InMemory::new());
        let faulty = FaultyStore::new(inner.clone());
        let (collecting, other) = (over(faulty.clone(), quick()), over(inner, quick()));
        let tenant = other.tenant("alice").await.unwrap();
        let (root, source) = mostly_dead(&other, &tenant, dir.path()).await;
        tick().await;
        let (reached, arrived) = tokio::sync::oneshot::channel();
        let mut reached = Some(reached);
        let mut count = 0;
        faulty.on(move |_, _| {
            count += 1;
            if count == at + 1 {
                let _ = reached.take().map(|reached| reached.send(()));
                Fault::Slow(Duration::from_millis(40))
            } else {
                Fault::None
            }
        });
        let more = snapshot(dir.path(), &[14, 15, 30]);
        let options = PushOptions::new(dir.path().join("other-index"));
        let push = async {
            match arrived.await {
                Ok(()) => Some(other.push(&tenant, &more, &options).await),
                Err(_) => None,
            }
        };
        let collect = async {
            let collected = collecting.collect(&tenant, AT_ONCE).await;
            faulty.heal();
            collected.unwrap();
        };
        let (pushed, ()) = tokio::join!(push, collect);
        let Some(pushed) = pushed else {
            // With fewer requests, the collection would not have repacked.
            assert!(at > 20, "{at} requests");
            return;
        };
        let pushed = match pushed {
            Err(StoreError::Gone(_)) => other.push(&tenant, &more, &options).await,
            other => other,
        };
        let (name, _) = pushed.unwrap();
        for _ in 0..3 {
            tick().await;
            collecting.collect(&tenant, AT_ONCE).await.unwrap();
            assert_same(&other, &tenant, name.root, &more).await;
            assert_same(&other, &tenant, root, &source).await;
        }
    }
    panic!("the collection never ended");
}

/// Between any two requests of collections that repack and remove a pack, a guest on another host
/// requests a chunk of it, with that host's older locations.
#[tokio::test]
async fn a_guest_gets_its_chunks_between_any_two_requests_of_collections() {
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn object_store::ObjectStore> = Arc::new(object_store::memory::InMemory::new());
    let faulty = FaultyStore::new(inner.clone());
    let (collecting, other) = (
        over(faulty.clone(), quick()),
        Arc::new(over(inner, quick())),
    );
    let tenant = other.tenant("alice").await.unwrap();
    let (root, source) = mostly_dead(&other, &tenant, dir.path()).await;
    let before = other.open(&tenant, root).await.unwrap();
    let (wanted, mut requests) = (content(&source, 0), 0);
    let (request_sender, mut request_receiver) = tokio::sync::mpsc::unbounded_channel();
    faulty.on(move |_, _| {
        let _ = request_sender.send(());
        Fault::Slow(Duration::from_millis(5))
    });
    let collecting = async {
        for _ in 0..2 {
            tick().await;
            collecting.collect(&tenant, AT_ONCE).await.unwrap();
        }
        faulty.on(|_, _| Fault::None);
    };
    let guests = async {
        while request_receiver.recv().await.is_some() {
            let place = dir.path().join(format!("cache-{requests}"));
            let cache = Arc::new(LayerCache::open(place, u64::MAX).unwrap());
            let part = other.cached_part(&before, 0, &cache).unwrap();
            for chunk in [0, 2] {
                assert!(other.fetch_chunk(&part, chunk).await.unwrap());
                let range = chunk as usize * CHUNK..(chunk as usize + 1) * CHUNK;
                let read = std::fs::read(part.layer().path()).unwrap();
                assert!(read[range.clone()] == wanted[range], "request {requests}");
            }
            requests += 1;
        }
    };
    tokio::join!(collecting, guests);
    assert!(requests > 30, "{requests} requests");
}

#[tokio::test]
async fn collections_run_only_when_they_are_due() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    mostly_dead(&store, &tenant, dir.path()).await;
    let options = GcOptions::default();
    store.collect(&tenant, options).await.unwrap();
    // The last collection was less than the interval ago.
    let last = store
        .collect_if_due(&tenant, options, Duration::from_secs(60))
        .await
        .unwrap();
    assert_eq!(last, None);
    tick().await;
    let due = store.collect_if_due(&tenant, options, Duration::from_millis(1));
    assert!(due.await.unwrap().is_some());
}
