//! Garbage collection: unused objects are removed and used objects remain, under all interleavings.
//! A collection *condemns* unused objects. A later one removes them if they are still unused. The
//! *manifest* of a snapshot lists its chunks, and its *locations* list the *packs* (objects with
//! many chunks) that contain them. A *reader* is a host that has not fetched all chunks of a
//! snapshot yet.

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

/// Collects twice, so that unused objects are removed. Returns the report of the second collection.
async fn collect_twice(store: &SharedStore, tenant: &Tenant) -> GcReport {
    let mut report = GcReport::default();
    for _ in 0..2 {
        tick().await;
        report = store.collect(tenant, AT_ONCE).await.unwrap();
    }
    report
}

#[tokio::test]
async fn a_removed_snapshot_is_removed_with_the_objects_that_only_it_needs() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let (kept, gone) = (
        snapshot(dir.path(), &[1, 2, 3]),
        snapshot(dir.path(), &[3, 4, 5]),
    );
    let (kept_name, _) = store.push(&tenant, &kept, &options).await.unwrap();
    let (gone_name, _) = store.push(&tenant, &gone, &options).await.unwrap();
    collect_twice(&store, &tenant).await;
    assert_eq!(store.stats(&tenant).await.unwrap().packs, 2);
    store.remove(&tenant, gone_name.root).await.unwrap();
    tick().await;
    let first = store.collect(&tenant, AT_ONCE).await.unwrap();
    // The manifest, the locations and the pack of the removed snapshot.
    assert_eq!((first.condemned, first.removed), (3, 0));
    tick().await;
    let second = store.collect(&tenant, AT_ONCE).await.unwrap();
    assert_eq!((second.condemned, second.removed), (0, 3));
    assert!(matches!(
        store.open(&tenant, gone_name.root).await,
        Err(StoreError::Missing { .. })
    ));
    assert_same(&store, &tenant, kept_name.root, &kept).await;
    // The removed snapshot can be pushed again.
    let (again, _) = store.push(&tenant, &gone, &options).await.unwrap();
    assert_same(&store, &tenant, again.root, &gone).await;
}

#[tokio::test]
async fn no_object_younger_than_the_grace_period_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let (name, _) = store
        .push(&tenant, &snapshot(dir.path(), &[1]), &options)
        .await
        .unwrap();
    store.remove(&tenant, name.root).await.unwrap();
    for _ in 0..3 {
        tick().await;
        let report = store.collect(&tenant, GcOptions::default()).await.unwrap();
        assert_eq!((report.condemned, report.removed), (0, 0));
    }
}

#[tokio::test]
async fn an_ancestor_stays_until_its_last_descendant_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let parent_source = snapshot(dir.path(), &[1]);
    let (parent, _) = store.push(&tenant, &parent_source, &options).await.unwrap();
    let mut source = snapshot(dir.path(), &[2]);
    source.lineage = vec![parent];
    let (child, _) = store.push(&tenant, &source, &options).await.unwrap();
    store.remove(&tenant, parent.root).await.unwrap();
    collect_twice(&store, &tenant).await;
    assert_same(&store, &tenant, parent.root, &parent_source).await;
    store.remove(&tenant, child.root).await.unwrap();
    collect_twice(&store, &tenant).await;
    let stats = store.stats(&tenant).await.unwrap();
    assert_eq!(
        (stats.snapshots, stats.packs, stats.manifest_bytes),
        (0, 0, 0)
    );
}

#[tokio::test]
async fn a_stock_template_stays_while_any_tenant_needs_it() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let shared = store.tenant(SHARED_TENANT).await.unwrap();
    let alice = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let template_source = snapshot(dir.path(), &[1]);
    let (template, _) = store
        .push(&shared, &template_source, &options)
        .await
        .unwrap();
    let mut source = snapshot(dir.path(), &[2]);
    source.lineage = vec![template];
    let (child, _) = store.push(&alice, &source, &options).await.unwrap();
    store.remove(&shared, template.root).await.unwrap();
    collect_twice(&store, &shared).await;
    assert_same(&store, &shared, template.root, &template_source).await;
    store.remove(&alice, child.root).await.unwrap();
    collect_twice(&store, &alice).await;
    collect_twice(&store, &shared).await;
    assert_eq!(store.snapshots(&shared).await.unwrap(), []);
}

#[tokio::test]
async fn a_removed_snapshot_stays_while_a_host_has_not_fetched_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let big = snapshot(dir.path(), &(1..=16).collect::<Vec<_>>());
    let source = snapshot(dir.path(), &[3, 0, 14, 20]);
    let (other, _) = store.push(&tenant, &big, &options).await.unwrap();
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    let cache = Arc::new(LayerCache::open(dir.path().join("cache"), u64::MAX).unwrap());
    let part = store.cached_part(&remote, 0, &cache).unwrap();
    store.set_reader(&tenant, name.root, "here").await.unwrap();
    for root in [name.root, other.root] {
        store.remove(&tenant, root).await.unwrap();
    }
    // The chunks are moved to another pack. The manifest, the locations and the pack of the large
    // snapshot are removed.
    let report = collect_twice(&store, &tenant).await;
    assert_eq!((report.readers, report.removed), (1, 3), "{report:?}");
    assert!(store.fetch_chunk(&part, 2).await.unwrap());
    collect_twice(&store, &tenant).await;
    store.fill(&part, Selection::All).await.unwrap();
    assert!(std::fs::read(part.layer().path()).unwrap() == content(&source, 0));
    assert_same(&store, &tenant, name.root, &source).await;
    // The registration of a reader expires.
    tick().await;
    let late = GcOptions {
        reader_time: Duration::ZERO,
        ..AT_ONCE
    };
    assert_eq!(store.collect(&tenant, late).await.unwrap().readers, 0);
    store.set_reader(&tenant, name.root, "here").await.unwrap();
    store
        .remove_reader(&tenant, name.root, "here")
        .await
        .unwrap();
    collect_twice(&store, &tenant).await;
    let gone = store.open(&tenant, name.root).await;
    assert!(matches!(gone, Err(StoreError::Missing { .. })), "{gone:?}");
}

#[tokio::test]
async fn a_name_finds_and_protects_its_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let (alice, bob) = (store.tenant("alice").await, store.tenant("bob").await);
    let (alice, bob) = (alice.unwrap(), bob.unwrap());
    let options = PushOptions::new(dir.path().join("index"));
    let (source, other) = (snapshot(dir.path(), &[1]), snapshot(dir.path(), &[2]));
    let (name, _) = store.push(&alice, &source, &options).await.unwrap();
    let (other_name, _) = store.push(&alice, &other, &options).await.unwrap();
    for id in ["snap-1", "snap-2"] {
        store.set_name(&alice, id, name.root).await.unwrap();
    }
    assert_eq!(store.named(&alice, "snap-3").await.unwrap(), None);
    assert_eq!(store.named(&bob, "snap-1").await.unwrap(), None);
    // Names of an earlier generation of keys are found with the keys of a later generation.
    let alice = store.rotate("alice").await.unwrap();
    let named = store.named(&alice, "snap-1").await.unwrap();
    assert_eq!(named, Some(name.root));
    // Remove a name of two with the same content: the other protects the content.
    store.remove_name(&alice, "snap-1").await.unwrap();
    store.remove(&alice, name.root).await.unwrap();
    collect_twice(&store, &alice).await;
    assert_eq!(store.named(&alice, "snap-1").await.unwrap(), None);
    assert_same(&store, &alice, name.root, &source).await;
    // A name that moves to another snapshot no longer protects the first one.
    store
        .set_name(&alice, "snap-2", other_name.root)
        .await
        .unwrap();
    let named = store.named(&alice, "snap-2").await.unwrap();
    assert_eq!(named, Some(other_name.root));
    collect_twice(&store, &alice).await;
    assert_eq!(store.snapshots(&alice).await.unwrap(), [other_name.root]);
}

#[tokio::test]
async fn a_name_that_was_moved_in_the_bucket_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let alice = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let mut roots = Vec::new();
    for (id, chunk) in [("a", 1), ("b", 2)] {
        let source = snapshot(dir.path(), &[chunk]);
        let (name, _) = store.push(&alice, &source, &options).await.unwrap();
        store.set_name(&alice, id, name.root).await.unwrap();
        roots.push(name.root);
    }
    let names = store.backend().list("").await.unwrap();
    let mut names = names.iter().filter(|found| found.key.contains("/names/"));
    let (one, two) = (names.next().unwrap(), names.next().unwrap());
    let content = store.backend().get(&one.key, 4096).await.unwrap();
    store.backend().put(&two.key, content).await.unwrap();
    let refused = async |id| store.named(&alice, id).await.is_err();
    // The replaced name is rejected. The other one is intact.
    assert!(refused("a").await != refused("b").await);
}

#[tokio::test]
async fn a_push_does_not_reuse_condemned_objects() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let (old, _) = store
        .push(&tenant, &snapshot(dir.path(), &[1, 2]), &options)
        .await
        .unwrap();
    store.remove(&tenant, old.root).await.unwrap();
    tick().await;
    store.collect(&tenant, AT_ONCE).await.unwrap();
    let source = snapshot(dir.path(), &[1, 2, 3]);
    let (name, report) = store.push(&tenant, &source, &options).await.unwrap();
    // No condemned chunk is reused: all three chunks of memory and the chunk of the state are new.
    assert_eq!(report.new_chunks, 4);
    collect_twice(&store, &tenant).await;
    assert_same(&store, &tenant, name.root, &source).await;
}

/// Collections run before each of the first 25 requests of a push that reuses objects due for
/// removal.
#[tokio::test]
async fn a_push_survives_collections_between_any_two_of_its_requests() {
    let mut at = 0;
    loop {
        let dir = tempfile::tempdir().unwrap();
        let inner: Arc<dyn object_store::ObjectStore> =
            Arc::new(object_store::memory::InMemory::new());
        let faulty = FaultyStore::new(inner.clone());
        let (pushing, collecting) = (over(faulty.clone(), quick()), over(inner, quick()));
        let tenant = pushing.tenant("alice").await.unwrap();
        let options = PushOptions::new(dir.path().join("index"));
        let (old, _) = collecting
            .push(&tenant, &snapshot(dir.path(), &[1, 2]), &options)
            .await
            .unwrap();
        collecting.remove(&tenant, old.root).await.unwrap();
        tick().await;
        // A request of the push waits while two collections run.
        let (reached, arrived) = tokio::sync::oneshot::channel();
        let mut reached = Some(reached);
        let mut count = 0;
        faulty.on(move |_, _| {
            count += 1;
            if count == at + 1 {
                let _ = reached.take().map(|reached| reached.send(()));
                Fault::Slow(Duration::from_millis(60))
            } else {
                Fault::None
            }
        });
        let source = snapshot(dir.path(), &[1, 2, 3]);
        let collections = async {
            if arrived.await.is_ok() {
                collect_twice(&collecting, &tenant).await;
            }
        };
        let push = async {
            let pushed = pushing.push(&tenant, &source, &options).await;
            faulty.on(|_, _| Fault::None);
            pushed
        };
        let (pushed, ()) = tokio::join!(push, collections);
        // Either the push fails with a removed object, or the snapshot is complete and remains so.
        match pushed {
            Ok((name, _)) => {
                collect_twice(&collecting, &tenant).await;
                assert_same(&collecting, &tenant, name.root, &source).await;
            }
            Err(StoreError::Gone(_)) => {
                let (name, _) = pushing.push(&tenant, &source, &options).await.unwrap();
                assert_same(&collecting, &tenant, name.root, &source).await;
            }
            Err(e) => panic!("at request {at}: {e}"),
        }
        at += 1;
        if at > 24 {
            break;
        }
    }
}

/// A collection is interrupted at each of its requests.
#[tokio::test]
async fn an_interrupted_collection_damages_no_snapshot() {
    for at in 0..60 {
        let dir = tempfile::tempdir().unwrap();
        let inner: Arc<dyn object_store::ObjectStore> =
            Arc::new(object_store::memory::InMemory::new());
        let faulty = FaultyStore::new(inner.clone());
        let (collecting, other) = (over(faulty.clone(), quick()), over(inner, quick()));
        let tenant = other.tenant("alice").await.unwrap();
        let options = PushOptions::new(dir.path().join("index"));
        let source = snapshot(dir.path(), &[1, 2]);
        let (kept, _) = other.push(&tenant, &source, &options).await.unwrap();
        let (gone, _) = other
            .push(&tenant, &snapshot(dir.path(), &[2, 3]), &options)
            .await
            .unwrap();
        other.remove(&tenant, gone.root).await.unwrap();
        tick().await;
        faulty.die_at(at);
        let both = async {
            for _ in 0..2 {
                tick().await;
                collecting.collect(&tenant, AT_ONCE).await?;
            }
            Ok::<_, StoreError>(())
        };
        let died = faulty.until_death(both).await.is_none();
        assert_same(&other, &tenant, kept.root, &source).await;
        // The next collection, on another host, completes the work.
        let options = GcOptions {
            lock_time: Duration::ZERO,
            ..AT_ONCE
        };
        for _ in 0..3 {
            tick().await;
            other.collect(&tenant, options).await.unwrap();
        }
        assert_same(&other, &tenant, kept.root, &source).await;
        assert_eq!(other.snapshots(&tenant).await.unwrap(), [kept.root]);
        let stats = other.stats(&tenant).await.unwrap();
        assert_eq!((stats.packs, stats.condemned), (1, 0));
        if !died {
            return;
        }
    }
    panic!("the collection never ended");
}

#[tokio::test]
async fn one_collection_runs_at_a_time() {
    let (faulty, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    faulty.on(|op, key| {
        if op == Op::Get && key.ends_with("condemned") {
            Fault::Slow(Duration::from_millis(100))
        } else {
            Fault::None
        }
    });
    let (a, b) = tokio::join!(
        store.collect(&tenant, AT_ONCE),
        store.collect(&tenant, AT_ONCE)
    );
    let refused = [a, b]
        .into_iter()
        .filter_map(Result::err)
        .collect::<Vec<_>>();
    assert!(
        matches!(refused[..], [StoreError::Collecting(_)]),
        "{refused:?}"
    );
}

#[tokio::test]
async fn verify_names_each_changed_chunk_and_repair_restores_it() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("store");
    let url: StoreUrl = format!("file://{}", place.display()).parse().unwrap();
    let store = SharedStore::new(url.open(quick()).unwrap(), keyring());
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let source = snapshot(dir.path(), &(1..=20).collect::<Vec<_>>());
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    assert_eq!(store.verify(&remote).await.unwrap(), []);
    let packs = walk(&place)
        .into_iter()
        .find(|path| path.to_string_lossy().contains("/packs/"));
    let pack = packs.unwrap();
    let mut bytes = std::fs::read(&pack).unwrap();
    // Change a bit in the third frame, which is chunk 1: chunks 2 and 0, the working set, precede
    // it. The header of a pack has 64 bytes, and a frame has 41 bytes in addition to its chunk.
    bytes[64 + 2 * (CHUNK + 41) + 1000] ^= 4;
    std::fs::write(&pack, &bytes).unwrap();
    let damages = store.verify(&remote).await.unwrap();
    assert_eq!(damages.len(), 1);
    assert_eq!(
        (damages[0].part.as_str(), damages[0].chunk),
        ("memory.layer", 1)
    );
    // A copy with other content does not repair the chunk; an identical copy does.
    let wrong = snapshot(dir.path(), &[7; 20]);
    assert_eq!(
        store.repair(&remote, &damages, &wrong).await.unwrap(),
        damages
    );
    assert_eq!(store.repair(&remote, &damages, &source).await.unwrap(), []);
    let remote = store.open(&tenant, name.root).await.unwrap();
    assert_eq!(store.verify(&remote).await.unwrap(), []);
    assert_same(&store, &tenant, name.root, &source).await;
    // The whole pack is missing. Of its 21 chunks, one is in the pack that the repair wrote.
    std::fs::remove_file(&pack).unwrap();
    assert_eq!(store.verify(&remote).await.unwrap().len(), 20);
}

/// Returns all files below a directory.
fn walk(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| {
            if path.is_dir() {
                walk(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}
