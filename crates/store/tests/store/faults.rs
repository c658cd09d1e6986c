//! Faults of the store, of the network and of hosts are tolerated or reported.
//!
//! A *chunk* is a piece of fixed size of a memory or disk. Chunks are stored in *packs*, and the
//! *manifest* of a snapshot lists its chunks.

use crate::support::*;
use jiffy_store::*;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn cache(dir: &std::path::Path) -> Arc<LayerCache> {
    Arc::new(LayerCache::open(dir.join("cache"), u64::MAX).unwrap())
}

#[tokio::test]
async fn requests_that_fail_temporarily_are_retried() {
    let dir = tempfile::tempdir().unwrap();
    let (faulty, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let mut count = 0;
    faulty.on(move |op, _| {
        count += 1;
        match (count % 3, op) {
            (0, Op::Put) => Fault::AnswerLost,
            (0, Op::Get) => Fault::Cut,
            (0, _) => Fault::Unavailable,
            _ => Fault::None,
        }
    });
    let source = snapshot(dir.path(), &[1, 0, 2, 3]);
    let options = PushOptions::new(dir.path().join("index"));
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    assert_same(&store, &tenant, name.root, &source).await;
    assert!(store.backend().traffic().retries > 3);
}

#[tokio::test]
async fn an_unavailable_store_is_reported_with_object_and_attempts() {
    let dir = tempfile::tempdir().unwrap();
    let (faulty, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    faulty.on(|_, _| Fault::Unavailable);
    let options = PushOptions::new(dir.path().join("index"));
    let failed = store
        .push(&tenant, &snapshot(dir.path(), &[1]), &options)
        .await
        .unwrap_err();
    assert!(
        matches!(failed, StoreError::Unavailable { attempts: 3, .. }),
        "{failed}"
    );
    let text = failed.to_string();
    assert!(
        text.contains("manifests/") && text.contains("503") && text.contains("try again"),
        "{text}"
    );
}

#[tokio::test]
async fn denied_requests_and_failed_conditions_are_not_retried() {
    let dir = tempfile::tempdir().unwrap();
    let (faulty, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    faulty.on(|_, _| Fault::Denied);
    let failed = store
        .push(&tenant, &snapshot(dir.path(), &[1]), &options)
        .await
        .unwrap_err();
    assert!(matches!(failed, StoreError::Denied { .. }), "{failed}");
    // A store also denies requests that were signed with a wrong time.
    assert!(failed.to_string().contains("clock"), "{failed}");
    faulty.on(|_, _| Fault::Precondition);
    let failed = store
        .push(&tenant, &snapshot(dir.path(), &[1]), &options)
        .await
        .unwrap_err();
    assert!(matches!(failed, StoreError::Conflict { .. }), "{failed}");
    assert_eq!(store.backend().traffic().retries, 0);
}

#[tokio::test]
async fn a_request_to_a_hanging_store_fails_at_the_deadline() {
    let settings = BackendSettings {
        request_timeout: Duration::from_millis(100),
        deadline: Duration::from_millis(250),
        attempts: 100,
        ..quick()
    };
    let (faulty, store) = in_memory_with(settings);
    faulty.on(|_, _| Fault::Never);
    let start = Instant::now();
    let failed = store.tenant("alice").await.unwrap_err();
    assert!(matches!(failed, StoreError::Timeout { .. }), "{failed}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn a_slow_range_is_requested_a_second_time() {
    let dir = tempfile::tempdir().unwrap();
    let settings = BackendSettings {
        hedge_after: Some(Duration::from_millis(20)),
        request_timeout: Duration::from_secs(60),
        ..quick()
    };
    let (faulty, store) = in_memory_with(settings);
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir.path(), &[1, 2]);
    let options = PushOptions::new(dir.path().join("index"));
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    let mut first = true;
    faulty.on(move |op, key| {
        if op == Op::Get && key.contains("/packs/") && std::mem::take(&mut first) {
            Fault::Slow(Duration::from_secs(50))
        } else {
            Fault::None
        }
    });
    let (_, report) = store
        .pull(&remote, 0, Selection::All, &cache(dir.path()))
        .await
        .unwrap();
    assert!(report.seconds < 10.0);
    assert_eq!(store.backend().traffic().hedges, 1);
}

#[tokio::test]
async fn damage_in_transit_is_fetched_again_and_damage_in_the_store_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (faulty, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir.path(), &[1, 2]);
    let options = PushOptions::new(dir.path().join("index"));
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    let flip = |kind: &'static str, mut times: u32| {
        faulty.on(move |op, key| {
            if op == Op::Get && key.contains(kind) && times > 0 {
                times -= 1;
                Fault::Flip
            } else {
                Fault::None
            }
        });
    };
    flip("/packs/", 100);
    let failed = store
        .pull(&remote, 0, Selection::All, &cache(dir.path()))
        .await
        .unwrap_err();
    assert!(matches!(failed, StoreError::Damaged { .. }), "{failed}");
    assert!(
        failed.to_string().contains("/packs/") && failed.to_string().contains("repair"),
        "{failed}"
    );
    flip("/packs/", 1);
    let (layer, _) = store
        .pull(&remote, 0, Selection::All, &cache(dir.path()))
        .await
        .unwrap();
    assert!(fs::read(layer.path()).unwrap() == content(&source, 0));
    for kind in ["/manifests/", "/locations/"] {
        flip(kind, 100);
        let failed = store.open(&tenant, name.root).await.unwrap_err();
        assert!(matches!(failed, StoreError::Damaged { .. }), "{failed}");
    }
    // The host has no index of the packs in the store and reads damaged ones. It reuses no chunk of
    // these packs, and uploads all chunks again.
    flip("/packs/", 100);
    let options = PushOptions::new(dir.path().join("another-index"));
    let (_, report) = store
        .push(&tenant, &snapshot(dir.path(), &[1, 2, 3]), &options)
        .await
        .unwrap();
    // Three chunks of memory, and the chunk of the state.
    assert_eq!(report.new_chunks, 4);
}

#[tokio::test]
async fn manifests_of_another_tenant_version_or_size_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("store");
    let url: StoreUrl = format!("file://{}", place.display()).parse().unwrap();
    let store = SharedStore::new(url.open(quick()).unwrap(), keyring());
    let (alice, mallory) = (
        store.tenant("alice").await.unwrap(),
        store.tenant("mallory").await.unwrap(),
    );
    let options = PushOptions::new(dir.path().join("index"));
    let (name, _) = store
        .push(&alice, &snapshot(dir.path(), &[1]), &options)
        .await
        .unwrap();
    let hex = |tenant: &Tenant| {
        tenant
            .id()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let manifests = |tenant: &Tenant| place.join(hex(tenant)).join("manifests");
    // The owner of the bucket moves the manifest to another tenant.
    let ours = manifests(&alice).join(name.root.to_string());
    let moved = manifests(&mallory).join(name.root.to_string());
    fs::create_dir_all(manifests(&mallory)).unwrap();
    fs::copy(&ours, &moved).unwrap();
    let refused = store.open(&mallory, name.root).await.unwrap_err();
    assert!(matches!(refused, StoreError::Tenant { .. }), "{refused}");
    let mut newer = fs::read(&ours).unwrap();
    // Byte 8 is the version.
    newer[8] = 9;
    fs::write(&ours, newer).unwrap();
    let refused = store.open(&alice, name.root).await.unwrap_err().to_string();
    assert!(
        refused.contains("version 9") && refused.contains("newer jiffy"),
        "{refused}"
    );
    let file = fs::File::options().write(true).open(&ours).unwrap();
    file.set_len(MAX_MANIFEST_BYTES + 1).unwrap();
    let refused = store.open(&alice, name.root).await.unwrap_err();
    assert!(matches!(refused, StoreError::TooLarge { .. }), "{refused}");
}

/// The host of a push exits at each of its requests, and another host pushes the same snapshot.
#[tokio::test]
async fn an_interrupted_push_is_continued_by_another_host() {
    for at in 0..60 {
        let dir = tempfile::tempdir().unwrap();
        let inner: Arc<dyn object_store::ObjectStore> =
            Arc::new(object_store::memory::InMemory::new());
        let faulty = FaultyStore::new(inner.clone());
        let (pushing, other) = (over(faulty.clone(), quick()), over(inner, quick()));
        let tenant = other.tenant("alice").await.unwrap();
        let mut options = PushOptions::new(dir.path().join("index"));
        // At most two chunks per pack.
        options.pack_bytes = 150 << 10;
        let source = snapshot(dir.path(), &(1..=8).collect::<Vec<_>>());
        faulty.die_at(at);
        let push = faulty
            .until_death(pushing.push(&tenant, &source, &options))
            .await;
        let packs = other.stats(&tenant).await.unwrap().packs;
        // Only complete snapshots are visible.
        for root in other.snapshots(&tenant).await.unwrap() {
            assert_same(&other, &tenant, root, &source).await;
        }
        let (name, report) = other.push(&tenant, &source, &options).await.unwrap();
        // The snapshot has 9 chunks: 8 of memory, and the state. No chunk is uploaded twice, and
        // each pack has at least one.
        assert!(
            report.packs + packs <= 9,
            "{packs} packs, then {}",
            report.packs
        );
        assert_same(&other, &tenant, name.root, &source).await;
        if push.is_some() {
            return;
        }
    }
    panic!("the push never ended");
}

#[tokio::test]
async fn two_hosts_push_one_snapshot_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn object_store::ObjectStore> = Arc::new(object_store::memory::InMemory::new());
    let (a, b) = (over(inner.clone(), quick()), over(inner, quick()));
    let tenant = a.tenant("alice").await.unwrap();
    let source = snapshot(dir.path(), &(1..=30).collect::<Vec<_>>());
    let options = |name: &str| PushOptions::new(dir.path().join(name));
    let (first, second) = (options("a"), options("b"));
    let (first, second) = tokio::join!(
        a.push(&tenant, &source, &first),
        b.push(&tenant, &source, &second)
    );
    assert_eq!(first.unwrap().0, second.unwrap().0);
    let root = a.snapshots(&tenant).await.unwrap()[0];
    assert_same(&a, &tenant, root, &source).await;
}

#[tokio::test]
async fn chunks_that_arrived_before_a_failure_are_not_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let (faulty, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir.path(), &(1..=200).collect::<Vec<_>>());
    let mut options = PushOptions::new(dir.path().join("index"));
    options.pack_bytes = 1 << 20;
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    let mut count = 0;
    faulty.on(move |_, _| {
        count += 1;
        if count > 6 {
            Fault::Denied
        } else {
            Fault::None
        }
    });
    let cache = cache(dir.path());
    store
        .pull(&remote, 0, Selection::All, &cache)
        .await
        .unwrap_err();
    faulty.heal();
    let (layer, report) = store
        .pull(&remote, 0, Selection::All, &cache)
        .await
        .unwrap();
    // The first pull has fetched at least some of the 200 chunks.
    assert!(report.fetched < 190, "{} chunks", report.fetched);
    assert!(fs::read(layer.path()).unwrap() == content(&source, 0));
}

#[tokio::test]
async fn a_pull_finds_chunks_that_a_repair_wrote_to_other_packs() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("store");
    let url: StoreUrl = format!("file://{}", place.display()).parse().unwrap();
    let store = SharedStore::new(url.open(quick()).unwrap(), keyring());
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let source = snapshot(dir.path(), &[1, 2, 3]);
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let before = store.open(&tenant, name.root).await.unwrap();
    let hex = tenant
        .id()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect::<String>();
    fs::remove_dir_all(place.join(hex).join("packs")).unwrap();
    let damages = store.verify(&before).await.unwrap();
    // Three chunks of memory, and the chunk of the state.
    assert_eq!(damages.len(), 4);
    store.repair(&before, &damages, &source).await.unwrap();
    let (layer, _) = store
        .pull(&before, 0, Selection::All, &cache(dir.path()))
        .await
        .unwrap();
    assert!(fs::read(layer.path()).unwrap() == content(&source, 0));
}

#[tokio::test]
async fn a_source_that_changes_during_its_push_is_refused() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let (faulty, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir.path(), &[1, 2]);
    let file = source.parts[0].file.clone();
    faulty.on(move |op, _| {
        if op == Op::Put {
            file.write_all_at(b"changed", 100).unwrap();
        }
        Fault::None
    });
    let options = PushOptions::new(dir.path().join("index"));
    let failed = store.push(&tenant, &source, &options).await.unwrap_err();
    assert!(
        failed.to_string().contains("changed during the push"),
        "{failed}"
    );
    assert_eq!(store.snapshots(&tenant).await.unwrap(), []);
}

#[tokio::test]
async fn a_cache_that_cannot_be_written_is_reported_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let failed = LayerCache::open(file.join("cache"), 1).unwrap_err();
    assert!(failed.to_string().contains("cache"), "{failed}");
}

const CHILD_DIR: &str = "JIFFY_STORE_TEST_CHILD";

/// Pulls from a slow store until the process is killed: see the next test.
#[tokio::test]
async fn pull_in_a_child_process() {
    let Some(dir) = std::env::var_os(CHILD_DIR) else {
        return;
    };
    let dir = std::path::PathBuf::from(dir);
    let settings = BackendSettings {
        download_bytes_per_second: Some(8 << 20),
        ..quick()
    };
    let url: StoreUrl = format!("file://{}", dir.join("store").display())
        .parse()
        .unwrap();
    let store = SharedStore::new(url.open(settings).unwrap(), keyring());
    let tenant = store.tenant("alice").await.unwrap();
    let root = store.snapshots(&tenant).await.unwrap()[0];
    let remote = store.open(&tenant, root).await.unwrap();
    let chunks: Vec<u64> = (0..200).collect();
    for part in chunks.chunks(5) {
        store
            .pull(&remote, 0, Selection::Chunks(part), &cache(&dir))
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_killed_pull_marks_no_chunk_as_present_that_it_did_not_write() {
    let dir = tempfile::tempdir().unwrap();
    let url: StoreUrl = format!("file://{}", dir.path().join("store").display())
        .parse()
        .unwrap();
    let store = SharedStore::new(url.open(quick()).unwrap(), keyring());
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir.path(), &(1..=200).collect::<Vec<_>>());
    let options = PushOptions::new(dir.path().join("index"));
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    let cache = cache(dir.path());
    let mut killed = 0;
    // Kills the child when at least this number of chunks is present.
    for min_present in [1, 60, 120] {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "faults::pull_in_a_child_process"])
            .env(CHILD_DIR, dir.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let (layer, _) = store
                .pull(&remote, 0, Selection::Chunks(&[]), &cache)
                .await
                .unwrap();
            let present = (0..200).filter(|&chunk| layer.has(chunk)).count();
            if present >= min_present || child.try_wait().unwrap().is_some() {
                break;
            }
            assert!(Instant::now() < deadline, "{present} chunks present");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        child.kill().unwrap();
        killed += u32::from(child.wait().unwrap().signal() == Some(9));
        let (layer, _) = store
            .pull(&remote, 0, Selection::Chunks(&[]), &cache)
            .await
            .unwrap();
        let bytes = fs::read(layer.path()).unwrap();
        let wanted = content(&source, 0);
        for chunk in (0..200).filter(|&chunk| layer.has(chunk)) {
            let range = chunk as usize * CHUNK..(chunk as usize + 1) * CHUNK;
            assert!(bytes[range.clone()] == wanted[range], "chunk {chunk}");
        }
    }
    // At least one child was killed during its pull, not after it.
    assert!(killed > 0);
    let (layer, _) = store
        .pull(&remote, 0, Selection::All, &cache)
        .await
        .unwrap();
    assert!(fs::read(layer.path()).unwrap() == content(&source, 0));
}
