//! Fetches of snapshots from the store: complete and correct, or rejected without remains. A
//! *layer* is the part of a memory or disk that one snapshot stores. A *pack* is an object of the
//! store with many parts of layers.

use crate::fake;
use crate::uploads::{TestStore, figure, noise, stored};

use fake::{Bench, base, create_id, until};
use jiffy_sandbox_manager::{
    CreateSpec, ErrorKind, FetchScope, OperationError, SandboxSettings, SandboxSource,
    SandboxState, Sandboxes,
};
use std::fs;
use std::time::Duration;

/// Metric: bytes that a host has read from the store.
const READ: &str = "jiffy_store_bytes_total{direction=\"read\"}";

fn from(snapshot: &str, owner: Option<&str>) -> CreateSpec {
    CreateSpec {
        source: SandboxSource::Snapshot(snapshot.to_owned()),
        settings: owned_by(owner),
        ..base()
    }
}

/// Returns the settings of a sandbox of `owner`.
fn owned_by(owner: Option<&str>) -> SandboxSettings {
    SandboxSettings {
        owner: owner.map(str::to_owned),
        ..SandboxSettings::default()
    }
}

/// Pushes a snapshot of a sandbox of `owner` with `text` in its memory, from a host that exits.
async fn pushed(store: &TestStore, owner: Option<&str>, text: &str) -> String {
    let bench = Bench::new();
    let host = bench.open_with(store.options("there", None)).await;
    let spec = CreateSpec {
        settings: owned_by(owner),
        ..base()
    };
    let id = host.create(spec).await.unwrap().id().to_owned();
    bench.world.write(&id, text);
    let snapshot = host
        .snapshot(&id, Some("moving".into()))
        .await
        .unwrap()
        .id()
        .to_owned();
    stored(&host, &snapshot).await;
    snapshot
}

fn memory(bench: &Bench, id: &str) -> String {
    bench.world.body(id).memory.lock().unwrap().clone()
}

/// Checks that the host has nothing of a snapshot whose fetch failed.
fn assert_nothing_is_left(bench: &Bench, host: &Sandboxes) {
    assert!(bench.file_names().is_empty(), "{:?}", bench.file_names());
    assert!(host.snapshots().list(None).unwrap().is_empty());
    assert!(host.list().is_empty());
}

#[tokio::test]
async fn concurrent_creates_share_one_fetch_of_a_snapshot() {
    let (store, text) = (TestStore::new(), noise(3, 600_000));
    let snapshot = pushed(&store, None, &text).await;
    let bench = Bench::new();
    let host = bench.open_with(store.options("here", None)).await;
    // This id is valid, but the store does not contain it.
    let unknown = host.create(from("abcdefghijkmnpqrstuv", None)).await;
    let unknown = unknown.unwrap_err();
    assert!(
        matches!(unknown, OperationError::Unknown { .. }),
        "{unknown}"
    );
    let create = |_| {
        let (host, spec) = (host.clone(), from(&snapshot, None));
        tokio::spawn(async move { host.create(spec).await })
    };
    for sandbox in (0..10).map(create).collect::<Vec<_>>() {
        let sandbox = sandbox.await.unwrap().unwrap();
        assert!(memory(&bench, sandbox.id()).ends_with(&text));
    }
    // Ten creates have read about one copy of the text, which has 600,000 bytes and compresses
    // badly. A second copy would exceed the upper limit.
    let read = figure(&host, READ);
    assert!((300_000.0..800_000.0).contains(&read), "{read}");
    let local = host.snapshots().list(None).unwrap();
    let local = local.iter().find(|s| s.id() == snapshot).unwrap();
    assert_eq!(local.name(), Some("moving"));
    assert!(local.is_retained() && local.is_fetched());
    // A snapshot that is removed here remains in the store. Cached content is not fetched again.
    for sandbox in host.list() {
        host.remove(sandbox.id()).await.unwrap();
    }
    host.snapshots().remove(&snapshot).unwrap();
    let again = host.create(from(&snapshot, None)).await.unwrap();
    assert!(memory(&bench, again.id()).ends_with(&text));
    // The host reads descriptions of the snapshot again, which are much smaller than the text.
    assert!(figure(&host, READ) - read < 100_000.0);
}

#[tokio::test]
async fn snapshots_of_one_owner_are_invisible_to_others() {
    let store = TestStore::new();
    let snapshot = pushed(&store, Some("key1"), "secret").await;
    let bench = Bench::new();
    let host = bench.open_with(store.options("here", None)).await;
    for other in [Some("key2"), None] {
        let fetched = host
            .snapshots()
            .fetch(other, &snapshot, FetchScope::Requested);
        assert!(fetched.await.unwrap().is_none(), "{other:?}");
        let described = host
            .snapshots()
            .describe_stored(other, &snapshot, FetchScope::All);
        assert!(described.await.unwrap().is_none(), "{other:?}");
    }
    assert_nothing_is_left(&bench, &host);
    let own = host
        .snapshots()
        .fetch(Some("key1"), &snapshot, FetchScope::Requested);
    let own = own.await.unwrap().unwrap();
    assert_eq!(own.snapshot().owner(), Some("key1"));
    // The snapshot is on this host now, but still not visible to other owners.
    let other = host
        .snapshots()
        .fetch(Some("key2"), &snapshot, FetchScope::Requested);
    assert!(other.await.unwrap().is_none());
    let sandbox = host.create(from(&snapshot, Some("key1"))).await.unwrap();
    assert!(memory(&bench, sandbox.id()).ends_with("secret"));
}

#[tokio::test]
async fn a_failed_fetch_leaves_nothing_and_can_be_retried() {
    let store = TestStore::new();
    let snapshot = pushed(&store, None, "text").await;
    let bench = Bench::new();
    let host = bench.open_with(store.options("here", None)).await;
    for away in [TestStore::make_unreachable, TestStore::unmount] {
        away(&store);
        let error = host.create(from(&snapshot, None)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert!(error.retry_after() > Some(Duration::ZERO));
        // The store may have the snapshot, so the answer is not `None`.
        let described = (host.snapshots()).describe_stored(None, &snapshot, FetchScope::All);
        assert_eq!(described.await.unwrap_err().kind(), ErrorKind::Busy);
        assert_nothing_is_left(&bench, &host);
        // The missing store was not replaced by an empty one.
        store.make_reachable();
    }
    // A failure of the engine during the import leaves nothing either.
    bench.world.fail("import");
    host.create(from(&snapshot, None)).await.unwrap_err();
    assert_nothing_is_left(&bench, &host);
    bench.world.clear_failures();
    let sandbox = host.create(from(&snapshot, None)).await.unwrap();
    assert!(memory(&bench, sandbox.id()).ends_with("text"));
}

#[test]
fn a_daemon_killed_during_a_fetch_leaves_no_snapshot() {
    let (bench, store, text) = (Bench::new(), TestStore::new(), noise(7, 300_000));
    let snapshot = std::sync::Mutex::new(String::new());
    bench.run_and_kill(async {
        *snapshot.lock().unwrap() = pushed(&store, None, &text).await;
    });
    let snapshot = snapshot.into_inner().unwrap();
    let is_unknown = |host: &Sandboxes| {
        host.list().is_empty() && host.snapshots().list(None).unwrap().is_empty()
    };
    // Killed before the first file has arrived, and while the files are stored.
    for step in ["check-import", "import"] {
        bench.run_and_kill(async {
            let host = bench.open_with(store.options("here", None)).await;
            assert!(is_unknown(&host));
            bench.world.hang(step);
            let (creating, spec) = (host.clone(), from(&snapshot, None));
            tokio::spawn(async move { creating.create(spec).await });
            until("the fetch to hang", || bench.world.is_stuck(step)).await;
        });
        bench.world.clear_failures();
    }
    // Simulate a daemon that was killed after all files were stored, before the journal was
    // written.
    fs::write(bench.files().join(&snapshot), "left behind").unwrap();
    bench.run_and_kill(async {
        let host = bench.open_with(store.options("here", None)).await;
        assert!(is_unknown(&host));
        let sandbox = host.create(from(&snapshot, None)).await.unwrap();
        assert!(memory(&bench, sandbox.id()).ends_with(&text));
    });
}

#[tokio::test]
async fn damage_in_the_store_is_rejected_and_in_the_cache_repaired() {
    let (store, text) = (TestStore::new(), noise(5, 300_000));
    let snapshot = pushed(&store, None, &text).await;
    let bench = Bench::new();
    for kind in ["manifests", "locations", "packs", "names"] {
        let host = bench.open_with(store.options(kind, None)).await;
        let objects = store.objects(kind);
        assert!(!objects.is_empty());
        let whole: Vec<Vec<u8>> = objects.iter().map(|path| fs::read(path).unwrap()).collect();
        for (path, whole) in objects.iter().zip(&whole) {
            let mut broken = whole.clone();
            // The changed byte is after the header: in encrypted data, and in the first frame of a
            // pack.
            let at = 100.min(broken.len() - 1);
            broken[at] ^= 1;
            fs::write(path, broken).unwrap();
        }
        let error = host.create(from(&snapshot, None)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{kind}: {error}");
        assert!(matches!(error, OperationError::Store { .. }), "{error}");
        assert_nothing_is_left(&bench, &host);
        for (path, whole) in objects.iter().zip(whole) {
            fs::write(path, whole).unwrap();
        }
    }
    let host = bench.open_with(store.options("here", None)).await;
    host.create(from(&snapshot, None)).await.unwrap();
    for sandbox in host.list() {
        host.remove(sandbox.id()).await.unwrap();
    }
    // Damage the local copies of layers. The host detects it and reads the store again.
    host.snapshots().remove(&snapshot).unwrap();
    let layers = fs::read_dir(store.dir.path().join("here/store/layers")).unwrap();
    let layers = layers.flatten().map(|entry| entry.path());
    for path in layers.filter(|path| path.extension().is_some_and(|e| e == "data")) {
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    let sandbox = host.create(from(&snapshot, None)).await.unwrap();
    assert!(memory(&bench, sandbox.id()).ends_with(&text));
}

#[tokio::test]
async fn a_paused_sandbox_without_local_files_resumes_from_the_store() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let host = bench.open_with(store.options("one", None)).await;
    let id = create_id(&host).await;
    bench.world.write(&id, "asleep");
    let snapshot = host
        .pause(&id)
        .await
        .unwrap()
        .snapshot()
        .unwrap()
        .to_owned();
    stored(&host, &snapshot).await;
    drop(host);
    for name in bench.file_names() {
        fs::remove_file(bench.files().join(name)).unwrap();
    }
    let host = bench.open_with(store.options("one", None)).await;
    assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Paused);
    assert_eq!(
        *host.resume(&id).await.unwrap().state(),
        SandboxState::Running
    );
    assert!(memory(&bench, &id).ends_with("asleep"));
    // Other hosts can create a sandbox from the snapshot, but clients with API keys cannot.
    let other = Bench::new();
    let other_host = other.open_with(store.options("two", None)).await;
    let fetched = other_host
        .snapshots()
        .fetch(None, &snapshot, FetchScope::Requested);
    assert!(fetched.await.unwrap().is_none());
    let sandbox = other_host.create(from(&snapshot, None)).await.unwrap();
    assert!(memory(&other, sandbox.id()).ends_with("asleep"));
}

#[tokio::test]
async fn the_copies_of_a_sandbox_that_moved_are_removed_by_its_new_host() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let host = bench.open_with(store.options("one", None)).await;
    let id = create_id(&host).await;
    let paused = host.pause(&id).await.unwrap();
    let snapshot = paused.snapshot().unwrap().to_owned();
    stored(&host, &snapshot).await;
    let other = Bench::new();
    let other_host = other.open_with(store.options("two", None)).await;
    let moved = other_host.create(from(&snapshot, None)).await.unwrap();
    // From now on, the new host is responsible for the removal of the copies in the store.
    host.snapshots().set_copies_adopted(&snapshot, false);
    other_host.snapshots().set_copies_adopted(&snapshot, true);
    let names = store.objects("names").len();
    assert_eq!(names, 1);
    // The removal of the sandbox by its former host leaves the name in the store. The removal by
    // its new host removes the name.
    for (host, id) in [(&host, id.as_str()), (&other_host, moved.id())] {
        assert_eq!(store.objects("names").len(), 1);
        host.remove(id).await.unwrap();
        until("the snapshot to be removed from the host", || {
            host.snapshots().like(&snapshot).is_empty()
                && figure(host, "jiffy_store_removals_pending") == 0.0
        })
        .await;
    }
    assert!(store.objects("names").is_empty());
    assert!(!store.objects("removed").is_empty());
}
