//! Resumes of sandboxes on another host, and retractions after such a move. A *retraction* removes
//! a snapshot from the store.
//!
//! The *resume bundle* of a snapshot is an object with copies of the content that a host reads
//! first to resume it. A *pack* is an object in the store with many compressed and encrypted
//! chunks. A *lease* is an object that protects the objects of a push in progress.

use super::*;
use crate::host::{FoundSnapshot, MemoryPull, PushRequest, Pushed, first_chunks};
use jiffy_engine_api::{MICROVM, SnapshotFile, SnapshotFileKind, SnapshotParts};
use std::fs::File;
use std::os::unix::fs::FileExt;

const CHUNK: usize = crate::CHUNK_BYTES as usize;

/// Opens the store with the data directory `home`, as another host does.
fn open(dir: &Path, home: &str) -> Arc<RemoteStore> {
    let keys = dir.join("one/store/keys.toml");
    let remote = RemoteStore::open(&RemoteSettings {
        url: format!("file://{}/bucket", dir.display()).parse().unwrap(),
        keyring: keys.exists().then_some(keys),
        home: dir.join(home),
        cache_bytes: 1 << 30,
        upload_bytes_per_second: None,
        timeout: crate::host::STORE_TIMEOUT,
    });
    remote.unwrap()
}

/// Returns the files of a snapshot whose memory has 8 chunks. All chunks outside `changed` are
/// inherited.
fn parts(dir: &Path, id: &str, changed: std::ops::Range<u64>) -> SnapshotParts {
    let memory = tempfile::tempfile_in(dir).unwrap();
    memory.set_len(8 * CHUNK as u64).unwrap();
    for chunk in changed.clone() {
        let mut bytes = vec![0; CHUNK];
        let mut hasher = blake3::Hasher::new();
        hasher.update(id.as_bytes()).update(&chunk.to_le_bytes());
        hasher.finalize_xof().fill(&mut bytes);
        memory.write_all_at(&bytes, chunk * CHUNK as u64).unwrap();
    }
    let text = |content: &[u8]| {
        let file = tempfile::tempfile_in(dir).unwrap();
        file.write_all_at(content, 0).unwrap();
        file
    };
    let file = |kind, name: &str, file: File, inherited| SnapshotFile {
        kind,
        name: name.to_owned(),
        file: Arc::new(file),
        inherited,
    };
    let inherited = vec![0..changed.start, changed.end..8];
    SnapshotParts {
        id: id.to_owned(),
        engine: MICROVM.to_owned(),
        files: vec![
            file(SnapshotFileKind::Memory, "memory", memory, inherited),
            file(SnapshotFileKind::Disk(0), "disk", text(b"disk"), Vec::new()),
            file(
                SnapshotFileKind::DeviceState,
                "state",
                text(id.as_bytes()),
                Vec::new(),
            ),
            file(
                SnapshotFileKind::Other,
                "manifest.json",
                text(b"{}"),
                Vec::new(),
            ),
        ],
        working_set: vec![0, 3, 7],
        parent: None,
        template: "t".to_owned(),
        version: "v".to_owned(),
        kernel: "k".to_owned(),
        agent: String::new(),
        processor: String::new(),
    }
}

/// Pushes a snapshot with its ancestors `below`.
async fn push(
    remote: &RemoteStore,
    tenant: &str,
    parts: &SnapshotParts,
    below: &[crate::SnapshotName],
) -> Pushed {
    let (_cancel, cancelled) = tokio::sync::watch::channel(false);
    let request = PushRequest {
        tenant,
        parts,
        record: b"record",
        owner: "",
        created_ms: 1,
        lineage: below.to_vec(),
        named: tenant == LOCAL_TENANT,
        resumable: tenant == LOCAL_TENANT,
        renamed: false,
        cancelled,
    };
    remote.push(request).await.unwrap()
}

/// Returns the number of requests that a host has sent to the store.
fn requests(remote: &RemoteStore) -> u64 {
    let traffic = remote.traffic();
    traffic.gets + traffic.lists + traffic.heads + traffic.puts + traffic.deletes
}

/// Finds a snapshot twice and pulls everything that a guest needs first, like a resume.
async fn resume(remote: &RemoteStore, id: &str) -> Vec<FoundSnapshot> {
    let described = remote.find(None, id).await.unwrap().unwrap();
    remote
        .document(&described[0], crate::host::RECORD_PART)
        .await
        .unwrap()
        .unwrap();
    let lineage = remote.find(None, id).await.unwrap().unwrap();
    let first = first_chunks(&lineage).unwrap();
    for (snapshot, chunks) in lineage.iter().zip(&first) {
        let memory = MemoryPull::Chunks(chunks);
        let (files, _) = remote.pull(None, snapshot, memory).await.unwrap();
        assert_eq!(files.len(), 4);
        remote
            .document(snapshot, crate::host::RECORD_PART)
            .await
            .unwrap()
            .unwrap();
        remote
            .document(snapshot, crate::host::MANIFEST_PART)
            .await
            .unwrap()
            .unwrap();
    }
    lineage
}

#[tokio::test]
async fn a_resume_on_another_host_needs_few_requests() {
    let dir = tempfile::tempdir().unwrap();
    let one = open(dir.path(), "one");
    let template = push(&one, SHARED_TENANT, &parts(dir.path(), "t", 0..8), &[]).await;
    let first = push(
        &one,
        LOCAL_TENANT,
        &parts(dir.path(), "p1", 2..5),
        &template.lineage,
    )
    .await;
    let before = one.traffic();
    let newest = parts(dir.path(), "p2", 6..8);
    let second = push(&one, LOCAL_TENANT, &newest, &first.lineage).await;
    let now = one.traffic();
    // Puts of lease, pack, locations, manifest, name and bundle; one delete of the lease.
    let sent = [
        now.puts - before.puts,
        now.lists - before.lists,
        now.deletes - before.deletes,
    ];
    assert_eq!(sent, [6, 0, 1]);
    let two = open(dir.path(), "two");
    let lineage = resume(&two, "p2").await;
    let ids: Vec<&str> = lineage
        .iter()
        .map(|snapshot| snapshot.id.as_str())
        .collect();
    assert_eq!(ids, ["p2", "p1", "t"]);
    assert_eq!(lineage[0].parent.as_deref(), Some("p1"));
    assert_eq!(
        lineage
            .iter()
            .map(|snapshot| snapshot.shared)
            .collect::<Vec<_>>(),
        [false, false, true]
    );
    // In addition to the five requests below, this host opens both tenants for the first time, with
    // a listing and a read for each. The limit has a tolerance of three requests.
    assert!(requests(&two) <= 12, "{:?}", two.traffic());
    // This host has used both tenants before.
    let three = open(dir.path(), "three");
    three.prepare().await;
    let before = requests(&three);
    resume(&three, "p2").await;
    // Five requests: list and read of the name, and reads of the bundle, the manifest and the
    // locations. The last two are requested concurrently with the bundle.
    assert!(requests(&three) - before <= 5, "{:?}", three.traffic());
    // Without the bundle, the resume succeeds with more than twice as many requests as the limit of
    // host two.
    let tenant = three.tenant(None).await.unwrap();
    let root = second.lineage[0].root;
    three
        .shared
        .backend()
        .delete(&tenant.bundle_key(&root))
        .await
        .unwrap();
    let four = open(dir.path(), "four");
    let lineage = resume(&four, "p2").await;
    assert_eq!(lineage.len(), 3);
    assert!(requests(&four) > 24, "{:?}", four.traffic());
    // A retracted snapshot is not found, although it was found shortly before.
    assert!(two.find(None, "p2").await.unwrap().is_some());
    two.retract(LOCAL_TENANT, "p2", None, true).await.unwrap();
    assert!(two.find(None, "p2").await.unwrap().is_none());
}

#[tokio::test]
async fn a_host_that_did_not_push_a_snapshot_retracts_it_when_it_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let one = open(dir.path(), "one");
    let push_one = async |id: &str, below: &[crate::SnapshotName]| {
        push(&one, LOCAL_TENANT, &parts(dir.path(), id, 2..5), below).await
    };
    let first = push_one("p1", &[]).await;
    let second = push_one("p2", &first.lineage).await;
    let other = push_one("p3", &[]).await;
    let two = open(dir.path(), "two");
    let tenant = two.tenant(None).await.unwrap();
    let [first_root, second_root, other_root] =
        [&first, &second, &other].map(|pushed| pushed.lineage[0].root);
    let listed = async |kind: &str| {
        let listed = two.shared.backend().list(&tenant.key(kind)).await.unwrap();
        listed.len()
    };
    // If the new state is unknown or the same, no object is removed.
    let unknown = crate::Hash([1; 32]);
    let replaced = two.retract_replaced(LOCAL_TENANT, "p1", first_root, unknown);
    assert!(replaced.await.is_err());
    let replaced = two.retract_replaced(LOCAL_TENANT, "p1", first_root, first_root);
    assert!(!replaced.await.unwrap());
    assert_eq!((listed("names").await, listed("resume").await), (3, 3));
    // The second snapshot is based on the first one, whose content remains for further pauses.
    let replaced = two.retract_replaced(LOCAL_TENANT, "p1", first_root, second_root);
    assert!(!replaced.await.unwrap());
    assert_eq!((listed("names").await, listed("resume").await), (2, 2));
    assert_eq!(listed("removed").await, 0);
    assert!(two.find(None, "p1").await.unwrap().is_none());
    // A push that is based on the remaining content succeeds.
    push(
        &two,
        LOCAL_TENANT,
        &parts(dir.path(), "p4", 1..2),
        &second.lineage,
    )
    .await;
    // The third snapshot is based on neither. A repetition changes nothing.
    for _ in 0..2 {
        let replaced = two.retract_replaced(LOCAL_TENANT, "p2", second_root, other_root);
        assert!(replaced.await.unwrap());
        assert_eq!((listed("names").await, listed("resume").await), (2, 2));
        assert_eq!(listed("removed").await, 1);
    }
    assert!(two.find(None, "p2").await.unwrap().is_none());
    assert!(one.find(None, "p3").await.unwrap().is_some());
}
