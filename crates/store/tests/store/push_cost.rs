//! Cost of a push: it depends on the snapshot and its ancestors, not on the number of snapshots of
//! the tenant. Its ancestors are the snapshots that it is based on.
//!
//! A *pack* is an object in the store with many compressed and encrypted chunks. A *lease* is an
//! object that protects the objects of a push in progress.

use crate::support::*;
use jiffy_store::*;
use std::path::Path;
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

/// Tenant with a stock template, on one host.
struct Host {
    dir: tempfile::TempDir,
    store: SharedStore,
    tenant: std::sync::Arc<Tenant>,
    template: SnapshotName,
    pushes: u64,
}

impl Host {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (_, store) = in_memory();
        let shared = store.tenant(SHARED_TENANT).await.unwrap();
        let tenant = store.tenant("alice").await.unwrap();
        let options = PushOptions::new(dir.path().join("index"));
        let source = snapshot(dir.path(), &[1]);
        let (template, _) = store.push(&shared, &source, &options).await.unwrap();
        Self {
            dir,
            store,
            tenant,
            template,
            pushes: 0,
        }
    }

    /// Pushes and names a snapshot with new chunks. Returns its name and the requests.
    async fn push(&mut self, lineage: &[SnapshotName]) -> (SnapshotName, Traffic) {
        self.pushes += 1;
        let mut source = snapshot(self.dir.path(), &[2, 1000 + self.pushes]);
        source.attributes.id = format!("snapshot-{}", self.pushes);
        source.lineage = [lineage, &[self.template]].concat();
        let options = PushOptions::new(self.dir.path().join("index"));
        let before = self.store.backend().traffic();
        let (name, _) = (self.store.push(&self.tenant, &source, &options).await).unwrap();
        let id = &source.attributes.id;
        let naming = self.store.set_new_name(&self.tenant, id, name.root);
        naming.await.unwrap();
        let named = self.store.named(&self.tenant, id).await.unwrap();
        assert_eq!(named, Some(name.root));
        let mut traffic = self.store.backend().traffic();
        // One listing and one read are the check above.
        traffic.lists -= before.lists + 1;
        traffic.gets -= before.gets + 1;
        traffic.puts -= before.puts;
        traffic.heads -= before.heads;
        traffic.deletes -= before.deletes;
        (name, traffic)
    }

    /// Removes unused objects of the tenant and of the stock template.
    async fn collect(&self) {
        for name in ["alice", SHARED_TENANT] {
            let tenant = self.store.tenant(name).await.unwrap();
            for _ in 0..2 {
                tokio::time::sleep(Duration::from_millis(3)).await;
                self.store.collect(&tenant, AT_ONCE).await.unwrap();
            }
        }
    }
}

/// Returns the numbers of writes, listings and removals.
fn billed(traffic: &Traffic) -> [u64; 3] {
    [traffic.puts, traffic.lists, traffic.deletes]
}

#[tokio::test]
async fn a_pause_sends_as_many_requests_with_hundreds_of_snapshots_as_with_ten() {
    let mut host = Host::new().await;
    let mut sent = Vec::new();
    for count in [10, 400] {
        while host.pushes < count {
            host.push(&[]).await;
        }
        let (first, traffic) = host.push(&[]).await;
        // Lease, pack, locations, reference to the template, manifest, name; removal of the lease.
        assert_eq!(billed(&traffic), [6, 0, 1], "{traffic:?}");
        let (second, traffic) = host.push(&[first]).await;
        // The reference of the first pause is sufficient.
        assert_eq!(billed(&traffic), [5, 0, 1], "{traffic:?}");
        let (_, third) = host.push(&[second, first]).await;
        sent.push([traffic.gets, traffic.heads, third.gets, third.heads]);
        assert_eq!(billed(&third), [5, 0, 1], "{third:?}");
    }
    assert_eq!(sent[0], sent[1]);
    // Reads and existence checks of two pushes.
    assert!(sent[0].iter().sum::<u64>() < 40, "{sent:?}");
}

#[tokio::test]
async fn a_reference_to_a_template_lasts_as_long_as_a_descendant() {
    let mut host = Host::new().await;
    let (first, _) = host.push(&[]).await;
    let (second, _) = host.push(&[first]).await;
    let shared = host.store.tenant(SHARED_TENANT).await.unwrap();
    host.store
        .remove(&shared, host.template.root)
        .await
        .unwrap();
    for (id, root) in [("snapshot-1", first.root), ("snapshot-2", second.root)] {
        host.store.open(&shared, host.template.root).await.unwrap();
        host.store.remove_name(&host.tenant, id).await.unwrap();
        host.store.remove(&host.tenant, root).await.unwrap();
        host.collect().await;
    }
    assert_eq!(host.store.snapshots(&host.tenant).await.unwrap(), []);
    assert_eq!(host.store.snapshots(&shared).await.unwrap(), []);
}

/// Returns options of a push by `host`, with at most two chunks per pack.
fn options(dir: &Path, host: &str) -> PushOptions {
    PushOptions {
        pack_bytes: 150 << 10,
        ..PushOptions::new(dir.join(host))
    }
}

#[tokio::test]
async fn chunks_of_ancestors_that_another_host_pushed_are_not_sent_again() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let parent = snapshot(dir.path(), &[1, 2, 3, 4]);
    let one = options(dir.path(), "one");
    let (parent, _) = store.push(&tenant, &parent, &one).await.unwrap();
    let mut child = snapshot(dir.path(), &[1, 2, 3, 5]);
    child.lineage = vec![parent];
    let two = options(dir.path(), "two");
    let (child_name, report) = store.push(&tenant, &child, &two).await.unwrap();
    assert_eq!(report.new_chunks, 1);
    // A sibling on the same host reuses the packs that the host wrote last.
    let mut sibling = snapshot(dir.path(), &[6, 2, 3, 5]);
    sibling.lineage = vec![parent];
    let (sibling_name, report) = store.push(&tenant, &sibling, &two).await.unwrap();
    assert_eq!(report.new_chunks, 1);
    for (name, source) in [(child_name, &child), (sibling_name, &sibling)] {
        assert_same(&store, &tenant, name.root, source).await;
    }
}

#[tokio::test]
async fn a_pack_that_was_removed_or_truncated_is_not_reused() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let own = options(dir.path(), "index");
    for truncated in [false, true] {
        let seed = 10 * u64::from(truncated);
        let source = snapshot(dir.path(), &[seed + 1, seed + 2, seed + 3]);
        store.push(&tenant, &source, &own).await.unwrap();
        let all = store.backend().list("").await.unwrap();
        for pack in all.iter().filter(|object| object.key.contains("/packs/")) {
            if truncated {
                let cut = bytes::Bytes::from_static(&[0; 100]);
                store.backend().put(&pack.key, cut).await.unwrap();
            } else {
                store.backend().delete(&pack.key).await.unwrap();
            }
        }
        let other = snapshot(dir.path(), &[seed + 1, seed + 2, seed + 4]);
        let (name, report) = store.push(&tenant, &other, &own).await.unwrap();
        // Three chunks of memory, and the chunk of the state.
        assert_eq!(report.new_chunks, 4);
        assert_same(&store, &tenant, name.root, &other).await;
    }
}
