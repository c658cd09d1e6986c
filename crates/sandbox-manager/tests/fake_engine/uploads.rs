//! Uploads to a shared store: a snapshot that is reported as stored is in the store.
//!
//! The store divides the content of snapshots into *chunks* of 64 KiB, and writes many chunks into
//! one file, a *pack*. The *manifest* of a snapshot lists its chunks and ancestors. Each owner is a
//! *tenant* of the store with its own keys.

use crate::fake;

use fake::{Bench, Dice, base, create_id, snapshot_id, until};
use jiffy_fleet::{Authority, Heads};
use jiffy_fleet_core::{Epoch, MemberId, Owner};
use jiffy_sandbox_manager::{
    HostOptions, OperationError, SandboxSettings, Sandboxes, Snapshot, StoreState,
};
use jiffy_store::RemoteSnapshot;
use jiffy_store::host::{LOCAL_TENANT, RemoteSettings, RemoteStore};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

/// Store in a directory, with a client for checks.
pub struct TestStore {
    pub dir: tempfile::TempDir,
    client: Arc<RemoteStore>,
}

impl TestStore {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let client = open(&dir, "look", None);
        Self { dir, client }
    }

    fn bucket(&self) -> PathBuf {
        self.dir.path().join("bucket")
    }

    /// Returns options of a host that uses the store and sends at most `limit` bytes per second.
    pub fn options(&self, host: &str, limit: Option<u64>) -> HostOptions {
        HostOptions {
            remote: Some(open(&self.dir, host, limit)),
            ..HostOptions::default()
        }
    }

    /// Returns options of host `number`, which shares its stored sandboxes with other hosts.
    pub fn sharing_options(&self, number: u32) -> HostOptions {
        let remote = open(&self.dir, &format!("host{number}"), None);
        let owner = Owner {
            member: MemberId(number),
            epoch: Epoch(1),
        };
        self.options_of(remote, owner)
    }

    /// Like [`Self::sharing_options`], for the host `number` with this authority.
    pub fn member_options(&self, number: u32, host: impl Authority + 'static) -> HostOptions {
        let remote = open(&self.dir, &format!("host{number}"), None);
        self.options_of(remote, host)
    }

    fn options_of(&self, remote: Arc<RemoteStore>, host: impl Authority + 'static) -> HostOptions {
        HostOptions {
            heads: Some(Heads::new(remote.clone(), host)),
            remote: Some(remote),
            ..HostOptions::default()
        }
    }

    /// Returns the snapshot that `id` names for `tenant`.
    async fn find(&self, tenant: &str, id: &str) -> Option<RemoteSnapshot> {
        let tenant = self.client.tenant(Some(tenant)).await.unwrap();
        let root = self.client.shared.named(&tenant, id).await.unwrap()?;
        Some(self.client.shared.open(&tenant, root).await.unwrap())
    }

    /// Returns the files below directories with the name `kind`.
    pub fn objects(&self, kind: &str) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut directories = vec![self.bucket()];
        while let Some(dir) = directories.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    directories.push(entry.path());
                } else {
                    files.push(entry.path());
                }
            }
        }
        files.retain(|path| path.iter().any(|part| part == kind));
        files
    }

    /// Makes the store unreachable.
    pub fn make_unreachable(&self) {
        fs::rename(self.bucket(), self.dir.path().join("away")).unwrap();
        fs::write(self.bucket(), "").unwrap();
    }

    /// Makes the store look like an unmounted file system.
    pub fn unmount(&self) {
        fs::rename(self.bucket(), self.dir.path().join("away")).unwrap();
        fs::create_dir(self.bucket()).unwrap();
    }

    /// Ends the effect of [`Self::make_unreachable`] or [`Self::unmount`].
    pub fn make_reachable(&self) {
        if self.bucket().is_dir() {
            fs::remove_dir(self.bucket()).unwrap();
        } else {
            fs::remove_file(self.bucket()).unwrap();
        }
        fs::rename(self.dir.path().join("away"), self.bucket()).unwrap();
    }
}

/// Opens the shared store as the host `host`, with a limit of uploads in bytes per second.
fn open(dir: &tempfile::TempDir, host: &str, limit: Option<u64>) -> Arc<RemoteStore> {
    // The client for checks is opened first and creates the keys. All hosts use these keys.
    let keys = dir.path().join("look/store/keys.toml");
    let remote = RemoteStore::open(&RemoteSettings {
        url: format!("file://{}/bucket", dir.path().display())
            .parse()
            .unwrap(),
        keyring: keys.exists().then_some(keys),
        home: dir.path().join(host),
        cache_bytes: 1 << 20,
        upload_bytes_per_second: limit,
        timeout: jiffy_store::host::STORE_TIMEOUT,
    });
    remote.unwrap()
}

/// Returns a text that compresses badly.
pub fn noise(seed: u64, bytes: usize) -> String {
    let mut dice = Dice(seed);
    let letters = std::iter::from_fn(|| char::from_u32(33 + dice.throw(94) as u32));
    letters.take(bytes).collect()
}

/// Waits until the snapshot is in the store.
pub async fn stored(host: &Sandboxes, id: &str) -> Snapshot {
    let waiting = host.snapshots().wait_stored(id);
    let limit = std::time::Duration::from_secs(60);
    tokio::time::timeout(limit, waiting).await.unwrap().unwrap()
}

fn state(host: &Sandboxes, id: &str) -> Option<StoreState> {
    host.snapshots().store_state_of(id)
}

/// Returns the value of a metric.
pub fn figure(host: &Sandboxes, name: &str) -> f64 {
    let text = host.figures().render();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in {text}"));
    line.trim().parse().unwrap()
}

#[tokio::test]
async fn requested_and_pause_snapshots_are_uploaded_without_known_chunks() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let host = bench.open_with(store.options("one", None)).await;
    let id = create_id(&host).await;
    bench.world.write(&id, &noise(7, 3_000_000));
    let first = host.snapshot(&id, Some("first".into())).await.unwrap();
    let first = stored(&host, first.id()).await;
    assert_eq!(state(&host, first.id()), Some(StoreState::Stored));
    let sent = figure(&host, "jiffy_store_bytes_total{direction=\"written\"}");
    // The text compresses badly, so more than half of its size is sent.
    assert!(sent > 1_500_000.0, "{sent}");
    // No content changed, so only the description is sent.
    let second = host
        .pause(&id)
        .await
        .unwrap()
        .snapshot()
        .unwrap()
        .to_owned();
    stored(&host, &second).await;
    let more = figure(&host, "jiffy_store_bytes_total{direction=\"written\"}") - sent;
    assert!(more < 16_384.0, "{more}");
    let chunk = figure(&host, "jiffy_store_chunks_total{what=\"known\"}");
    // The text of 3 MB has 46 chunks of 64 KiB.
    assert!(chunk >= 46.0, "{chunk}");
    let stored_snapshot = store.find(LOCAL_TENANT, &second).await.unwrap();
    let below: Vec<String> = stored_snapshot
        .manifest
        .lineage
        .iter()
        .map(|n| n.root.to_string())
        .collect();
    assert_eq!(below[0], first.copy_roots().next().unwrap());
    assert_eq!(
        below.len(),
        2,
        "the template's snapshot is its other ancestor"
    );
    // Snapshots that no client requested are not uploaded.
    host.resume(&id).await.unwrap();
    let fork = host.fork(&id, 1, None).await.unwrap().snapshot;
    assert_eq!(state(&host, fork.id()), Some(StoreState::Local));
    assert!(store.find(LOCAL_TENANT, fork.id()).await.is_none());
}

#[tokio::test]
async fn each_owner_has_a_tenant_in_the_store() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let host = bench.open_with(store.options("one", None)).await;
    let settings = SandboxSettings {
        owner: Some("key1".into()),
        ..SandboxSettings::default()
    };
    let spec = jiffy_sandbox_manager::CreateSpec { settings, ..base() };
    let id = host.create(spec).await.unwrap().id().to_owned();
    let snapshot = snapshot_id(&host, &id).await;
    stored(&host, &snapshot).await;
    assert!(store.find("key1", &snapshot).await.is_some());
    assert!(store.find(LOCAL_TENANT, &snapshot).await.is_none());
    let alone = Bench::new();
    let host = alone.open().await;
    let id = create_id(&host).await;
    let snapshot = snapshot_id(&host, &id).await;
    assert_eq!(state(&host, &snapshot), None);
    let error = host.snapshots().wait_stored(&snapshot).await.unwrap_err();
    assert!(matches!(error, OperationError::NoStore), "{error}");
}

#[tokio::test]
async fn stock_template_snapshots_are_stored_once_for_all_owners() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let options = HostOptions {
        is_stock: |name| name == "base",
        ..store.options("one", None)
    };
    let host = bench.open_with(options).await;
    let mut snapshots = Vec::new();
    for owner in [None, Some("key1"), Some("key2")] {
        let settings = SandboxSettings {
            owner: owner.map(str::to_owned),
            ..SandboxSettings::default()
        };
        let spec = jiffy_sandbox_manager::CreateSpec { settings, ..base() };
        let id = host.create(spec).await.unwrap().id().to_owned();
        snapshots.push((owner, snapshot_id(&host, &id).await));
    }
    let mut below = std::collections::BTreeSet::new();
    for (owner, snapshot) in &snapshots {
        stored(&host, snapshot).await;
        let tenant = owner.unwrap_or(LOCAL_TENANT);
        let stored_snapshot = store.find(tenant, snapshot).await.unwrap();
        below.extend(stored_snapshot.manifest.lineage.iter().copied());
    }
    let below: Vec<_> = below.into_iter().collect();
    assert_eq!(below.len(), 1);
    assert_eq!(below[0].scope, jiffy_store::Scope::Shared);
    let shared = store
        .client
        .tenant(Some(jiffy_store::SHARED_TENANT))
        .await
        .unwrap();
    store
        .client
        .shared
        .open(&shared, below[0].root)
        .await
        .unwrap();
}

#[tokio::test]
async fn uploads_and_removals_continue_when_the_store_is_reachable_again() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let host = bench.open_with(store.options("one", None)).await;
    let id = create_id(&host).await;
    // This snapshot is removed while the store is unreachable.
    let removed = snapshot_id(&host, &id).await;
    stored(&host, &removed).await;
    store.make_unreachable();
    let pending = snapshot_id(&host, &id).await;
    let error = host.snapshots().wait_stored(&pending).await.unwrap_err();
    assert!(error.retry_after().is_some(), "{error}");
    assert_eq!(state(&host, &pending), Some(StoreState::Uploading));
    host.snapshots().remove(&removed).unwrap();
    store.make_reachable();
    until("the snapshot to be stored", || {
        state(&host, &pending) == Some(StoreState::Stored)
    })
    .await;
    until("the pending removals", || {
        figure(&host, "jiffy_store_removals_pending") == 0.0
    })
    .await;
    assert!(store.find(LOCAL_TENANT, &removed).await.is_none());
    assert!(store.find(LOCAL_TENANT, &pending).await.is_some());
}

/// Waits until the snapshot has neither a record nor files.
async fn wait_removed(bench: &Bench, host: &Sandboxes, id: &str) {
    until("the removal of the snapshot", || {
        host.snapshots().like(id).is_empty() && !bench.file_names().contains(id)
    })
    .await;
}

#[tokio::test]
async fn removing_a_snapshot_during_its_upload_leaves_nothing() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let host = bench.open_with(store.options("one", Some(6 << 20))).await;
    let id = create_id(&host).await;
    let earlier = snapshot_id(&host, &id).await;
    stored(&host, &earlier).await;
    let manifests = store.objects("manifests").len();
    bench.world.write(&id, &noise(9, 30_000_000));
    let snapshot = snapshot_id(&host, &id).await;
    // The snapshots of the template and of the sandbox have a pack each.
    until("a pack to be sent", || store.objects("packs").len() > 2).await;
    host.rollback(&id, &earlier).await.unwrap();
    host.snapshots().remove(&snapshot).unwrap();
    wait_removed(&bench, &host, &snapshot).await;
    // The snapshot of a paused sandbox is removed together with the sandbox.
    let packs = store.objects("packs").len();
    bench.world.write(&id, &noise(11, 30_000_000));
    let pause = host
        .pause(&id)
        .await
        .unwrap()
        .snapshot()
        .unwrap()
        .to_owned();
    until("a pack to be sent", || store.objects("packs").len() > packs).await;
    host.remove(&id).await.unwrap();
    wait_removed(&bench, &host, &pause).await;
    until("the uploads and removals to end", || {
        figure(&host, "jiffy_store_uploads_pending{state=\"running\"}") == 0.0
            && figure(&host, "jiffy_store_removals_pending") == 0.0
    })
    .await;
    assert!(store.find(LOCAL_TENANT, &snapshot).await.is_none());
    assert_eq!(store.objects("manifests").len(), manifests);
    // A lease in the store protects the objects of an upload in progress from a garbage collection.
    assert_eq!(store.objects("leases").len(), 0);
}

#[test]
fn the_next_daemon_continues_uploads_and_removals() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let snapshots = std::sync::Mutex::new(Vec::new());
    bench.run_and_kill(async {
        let host = bench.open_with(store.options("one", Some(1 << 20))).await;
        let id = create_id(&host).await;
        let first = snapshot_id(&host, &id).await;
        stored(&host, &first).await;
        bench.world.write(&id, &noise(3, 30_000_000));
        let second = snapshot_id(&host, &id).await;
        until("a pack to be sent", || store.objects("packs").len() > 2).await;
        // The snapshot is removed right before the daemon is killed, so the next daemon must remove
        // the copy.
        *snapshots.lock().unwrap() = vec![first.clone(), second];
        host.snapshots().remove(&first).unwrap();
    });
    let packs = store.objects("packs").len();
    let snapshots = snapshots.lock().unwrap().clone();
    bench.run_and_kill(async {
        let host = bench.open_with(store.options("one", None)).await;
        assert_ne!(state(&host, &snapshots[1]), Some(StoreState::Local));
        stored(&host, &snapshots[1]).await;
        // The chunks that the killed daemon had sent are known, and are not sent again.
        // A pack of 8 MiB has more than 64 chunks of 64 KiB.
        assert!(figure(&host, "jiffy_store_chunks_total{what=\"known\"}") >= 64.0);
        assert!(store.objects("packs").len() > packs);
        until("the pending removals", || {
            figure(&host, "jiffy_store_removals_pending") == 0.0
        })
        .await;
        assert!(store.find(LOCAL_TENANT, &snapshots[0]).await.is_none());
        assert!(store.find(LOCAL_TENANT, &snapshots[1]).await.is_some());
    });
}

#[tokio::test]
async fn hosts_can_push_the_same_chunks_concurrently() {
    let store = TestStore::new();
    let benches = [Bench::new(), Bench::new()];
    let mut hosts = Vec::new();
    for (bench, name) in benches.iter().zip(["one", "two"]) {
        let host = bench.open_with(store.options(name, None)).await;
        let id = create_id(&host).await;
        bench.world.write(&id, &noise(5, 9_000_000));
        hosts.push((host, id));
    }
    let (one, two) = (&hosts[0], &hosts[1]);
    let (a, b) = tokio::join!(one.0.snapshot(&one.1, None), two.0.snapshot(&two.1, None));
    let (a, b) = (a.unwrap().id().to_owned(), b.unwrap().id().to_owned());
    tokio::join!(stored(&one.0, &a), stored(&two.0, &b));
    for id in [a, b] {
        let stored_snapshot = store.find(LOCAL_TENANT, &id).await.unwrap();
        assert_eq!(stored_snapshot.manifest.parts[0].bytes, 9_000_000);
    }
}

#[tokio::test]
async fn a_snapshot_is_uploaded_again_after_its_base_was_removed() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let host = bench.open_with(store.options("one", None)).await;
    let id = create_id(&host).await;
    let below = snapshot_id(&host, &id).await;
    let middle = snapshot_id(&host, &id).await;
    let before = stored(&host, &middle).await;
    // From now on, the second snapshot does not depend on the files of its ancestors.
    bench.world.merged.lock().unwrap().insert(middle.clone());
    host.snapshots().remove(&below).unwrap();
    host.gc().unwrap();
    assert!(host.snapshots().like(&below).is_empty());
    until("the removal from the store", || {
        figure(&host, "jiffy_store_removals_pending") == 0.0
    })
    .await;
    let above = snapshot_id(&host, &id).await;
    stored(&host, &above).await;
    let stored_snapshot = store.find(LOCAL_TENANT, &above).await.unwrap();
    // The only ancestor is the second snapshot, whose content was uploaded again without ancestors.
    assert_eq!(stored_snapshot.manifest.lineage.len(), 1);
    let middle = store.find(LOCAL_TENANT, &middle).await.unwrap();
    assert_eq!(stored_snapshot.manifest.lineage[0].root, middle.root);
    assert_ne!(middle.root.to_string(), before.copy_roots().next().unwrap());
}

#[tokio::test]
async fn a_snapshot_that_the_store_lost_is_uploaded_again() {
    let (bench, store) = (Bench::new(), TestStore::new());
    let host = bench.open_with(store.options("one", None)).await;
    let id = create_id(&host).await;
    let below = snapshot_id(&host, &id).await;
    stored(&host, &below).await;
    // The store loses all snapshots, as after a restore of an old backup.
    for manifest in store.objects("manifests") {
        fs::remove_file(manifest).unwrap();
    }
    let above = snapshot_id(&host, &id).await;
    stored(&host, &above).await;
    let stored_snapshot = store.find(LOCAL_TENANT, &above).await.unwrap();
    assert_eq!(stored_snapshot.manifest.lineage.len(), 2);
    let tenant = store.client.tenant(None).await.unwrap();
    for name in &stored_snapshot.manifest.lineage {
        store.client.shared.open(&tenant, name.root).await.unwrap();
    }
}
