//! Urgent chunks, which a guest waits for, during fills of whole layers and after crashes. A *fill*
//! fetches the missing chunks of a layer into the cache of a host. A *straggler* is a request for
//! an urgent chunk.

use crate::support::*;
use jiffy_store::*;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const CHUNKS: u64 = 100;

fn cache(dir: &Path) -> Arc<LayerCache> {
    Arc::new(LayerCache::open(dir.join("cache"), u64::MAX).unwrap())
}

/// Pushes a snapshot with [`CHUNKS`] chunks of memory to a new store. Returns the faults of the
/// store, its client, the snapshot in the store, and its source.
async fn pushed(
    dir: &Path,
) -> (
    Arc<FaultyStore>,
    SharedStore,
    RemoteSnapshot,
    SnapshotSource,
) {
    let (faulty, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir, &(1..=CHUNKS).collect::<Vec<_>>());
    let mut options = PushOptions::new(dir.join("index"));
    options.pack_bytes = 1 << 20;
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    (faulty, store, remote, source)
}

/// Returns the content of a chunk in the cache.
fn chunk_of(part: &CachedPart, number: u64) -> Vec<u8> {
    let mut bytes = vec![0; CHUNK];
    let at = number * CHUNK as u64;
    std::os::unix::fs::FileExt::read_exact_at(part.layer().file(), &mut bytes, at).unwrap();
    bytes
}

#[tokio::test]
async fn an_urgent_chunk_does_not_wait_for_a_fill_of_its_layer() {
    let dir = tempfile::tempdir().unwrap();
    let (faulty, store, remote, source) = pushed(dir.path()).await;
    // The ranges of the fill stall; the first request after them succeeds.
    let gets = Arc::new(AtomicU64::new(0));
    let count = gets.clone();
    let stuck = (CHUNKS * CHUNK as u64).div_ceil(1 << 20);
    faulty.on(move |op, key| {
        let fetches = op == Op::Get && key.contains("/packs/");
        if fetches && count.fetch_add(1, Ordering::SeqCst) < stuck {
            Fault::Slow(Duration::from_secs(60))
        } else {
            Fault::None
        }
    });
    // Simulate two processes: each has its own cache object over the same directory.
    let (ours, theirs) = (cache(dir.path()), cache(dir.path()));
    let bulk = store.cached_part(&remote, 0, &ours).unwrap();
    let part = store.cached_part(&remote, 0, &theirs).unwrap();
    let wanted = content(&source, 0);
    let stragglers = async {
        while gets.load(Ordering::SeqCst) < stuck {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let start = Instant::now();
        for number in [7, 50, CHUNKS - 1] {
            assert!(!part.has(number));
            assert!(store.fetch_chunk(&part, number).await.unwrap());
            let at = number as usize * CHUNK;
            assert!(part.has(number) && chunk_of(&part, number) == wanted[at..at + CHUNK]);
        }
        assert!(!store.fetch_chunk(&part, CHUNKS).await.unwrap());
        start.elapsed()
    };
    tokio::select! {
        filled = store.fill(&bulk, Selection::All) => panic!("it was filled: {filled:?}"),
        took = stragglers => assert!(took < Duration::from_secs(10), "{took:?}"),
    }
    // The locks of the fill are released; chunks that were fetched urgently are not fetched again.
    assert!(bulk.has(7));
    let report = store.fill(&bulk, Selection::All).await.unwrap();
    assert_eq!(report.fetched, CHUNKS - 3);
    assert!(std::fs::read(bulk.layer().path()).unwrap() == wanted);
}

/// Time stands still while a chunk is decrypted, so that a busy host causes no second fetch.
#[tokio::test(start_paused = true)]
async fn concurrent_requests_for_one_urgent_chunk_fetch_it_once() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store, remote, _) = pushed(dir.path()).await;
    let caches: Vec<_> = (0..4).map(|_| cache(dir.path())).collect();
    let parts: Vec<_> = caches
        .iter()
        .map(|cache| store.cached_part(&remote, 0, cache).unwrap())
        .collect();
    let before = store.backend().traffic().gets;
    let fetches = parts
        .iter()
        .chain(&parts)
        .map(|part| store.fetch_chunk(part, 42));
    for fetched in futures_util::future::join_all(fetches).await {
        assert!(fetched.unwrap());
    }
    assert_eq!(store.backend().traffic().gets - before, 1);
}

#[tokio::test(start_paused = true)]
async fn fills_of_one_layer_share_the_work() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store, remote, source) = pushed(dir.path()).await;
    let (a, b) = (cache(dir.path()), cache(dir.path()));
    let (first, second) = tokio::join!(
        store.pull(&remote, 0, Selection::All, &a),
        store.pull(&remote, 0, Selection::All, &b)
    );
    let ((layer, first), (_, second)) = (first.unwrap(), second.unwrap());
    assert_eq!(first.fetched + second.fetched, CHUNKS);
    assert!(std::fs::read(layer.path()).unwrap() == content(&source, 0));
}

#[tokio::test]
async fn after_a_boot_of_the_host_only_persisted_chunks_are_present() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store, remote, source) = pushed(dir.path()).await;
    let boot = |number: u8| {
        let place = dir.path().join("cache");
        Arc::new(LayerCache::open_in_boot(place, u64::MAX, [number; 16]).unwrap())
    };
    let part = |cache: &Arc<LayerCache>| store.cached_part(&remote, 0, cache).unwrap();
    let first = part(&boot(1));
    store.fetch_chunk(&first, 3).await.unwrap();
    first.layer().persist().unwrap();
    store.fetch_chunk(&first, 4).await.unwrap();
    drop(first);
    // The exit of a process loses no chunk.
    assert!(part(&boot(1)).has(3) && part(&boot(1)).has(4));
    // The host lost power after chunk 4 was marked and before it was persisted.
    let second = part(&boot(2));
    assert!(second.has(3) && !second.has(4));
    assert_eq!(
        store.fill(&second, Selection::All).await.unwrap().fetched,
        CHUNKS - 1
    );
    assert!(std::fs::read(second.layer().path()).unwrap() == content(&source, 0));
}

/// A process was killed while it wrote a chunk, and after writing one before setting its bit.
#[tokio::test]
async fn chunks_that_were_written_and_not_marked_are_fetched_again() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let (_, store, remote, source) = pushed(dir.path()).await;
    let cache = cache(dir.path());
    let part = |cache| store.cached_part(&remote, 0, cache).unwrap();
    let first = part(&cache);
    store.fetch_chunk(&first, 3).await.unwrap();
    let path = first.layer().path().to_owned();
    drop(first);
    let (whole, file) = (
        content(&source, 0),
        std::fs::File::options().write(true).open(path),
    );
    let file = file.unwrap();
    let torn = [&whole[4 * CHUNK..][..CHUNK / 2], &[0xee; 100]].concat();
    file.write_all_at(&torn, 4 * CHUNK as u64).unwrap();
    file.write_all_at(&[0xee; CHUNK], 5 * CHUNK as u64).unwrap();
    let second = part(&cache);
    let present: Vec<u64> = (0..CHUNKS).filter(|chunk| second.has(*chunk)).collect();
    assert_eq!(present, [3]);
    assert!(store.fetch_chunk(&second, 4).await.unwrap());
    assert!(second.has(4) && !second.has(5));
    let filled = store.fill(&second, Selection::All).await.unwrap();
    assert_eq!(filled.fetched, CHUNKS - 2);
    assert!(std::fs::read(second.layer().path()).unwrap() == whole);
}

#[tokio::test]
async fn a_pinned_layer_is_not_evicted_and_reports_persisted_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store, remote, _) = pushed(dir.path()).await;
    let cache = cache(dir.path());
    let part = store.cached_part(&remote, 0, &cache).unwrap();
    store.fetch_chunk(&part, 9).await.unwrap();
    let layer = part.layer().clone();
    layer.mark_holes(&remote.manifest.parts[0]).unwrap();
    // One bit per chunk: chunk 9 is bit 1 of byte 1.
    assert_eq!(layer.present().unwrap()[..2], [0, 1 << 1]);
    assert!(layer.persisted().unwrap().iter().all(|byte| *byte == 0));
    layer.persist().unwrap();
    assert_eq!(layer.persisted().unwrap(), layer.present().unwrap());
    let pin = dir.path().join("pin");
    layer.pin(&pin).unwrap();
    assert!(layer.is_pinned_by(&pin).unwrap());
    let root = remote.part_root(0).unwrap();
    drop((part, layer));
    assert_eq!(cache.evict_unused(u64::MAX).unwrap(), 0);
    let bytes = remote.manifest.parts[0].bytes;
    assert!(cache.layer_of(&root, bytes).unwrap().has(9));
    std::fs::remove_file(pin).unwrap();
    assert!(cache.evict_unused(u64::MAX).unwrap() > 0);
    assert!(!cache.layer_of(&root, bytes).unwrap().has(9));
}
