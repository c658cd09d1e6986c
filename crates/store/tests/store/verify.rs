//! Verification reports damaged chunks, indexes, locations and manifests, and repair restores
//! chunks from copies.
//!
//! A *pack* is an object in the store with many compressed and encrypted chunks. A *frame* is a
//! compressed and encrypted chunk in a pack. The *manifest* of a snapshot lists its chunks.
//!
//! A tenant is *foreign* to a host whose master keys do not decrypt the name of the tenant.

use crate::support::*;
use jiffy_store::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const SILENT: OnProgress<'static> = &|_, _, _| {};

/// Store in a directory, with one tenant.
struct Place {
    dir: tempfile::TempDir,
    store: SharedStore,
    tenant: Arc<Tenant>,
}

impl Place {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let url: StoreUrl = format!("file://{}/store", dir.path().display())
            .parse()
            .unwrap();
        let store = SharedStore::new(url.open(quick()).unwrap(), keyring());
        let tenant = store.tenant("alice").await.unwrap();
        Self { dir, store, tenant }
    }

    /// Returns options of a push by the only host of these tests.
    fn options(&self) -> PushOptions {
        PushOptions::new(self.dir.path().join("index"))
    }

    async fn verify(&self) -> VerifyReport {
        let verified = self.store.verify_tenant(&self.tenant, None, SILENT).await;
        verified.unwrap()
    }

    /// Returns the files of the store below `kind`, the largest first.
    fn files(&self, kind: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        walk(&self.dir.path().join("store"), &mut found);
        found.retain(|path| path.to_string_lossy().contains(&format!("/{kind}/")));
        found.sort_by_key(|path| std::cmp::Reverse(fs::metadata(path).unwrap().len()));
        found
    }
}

/// Adds all files below a directory to `found`.
fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            walk(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// Flips a bit `at` bytes before the end.
fn flip_from_end(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.len() - at;
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[tokio::test]
async fn each_chunk_index_locations_and_manifest_that_changed_is_named() {
    let place = Place::new().await;
    for seeds in [&[1, 2, 3][..], &[2, 3, 4, 5]] {
        let source = snapshot(place.dir.path(), seeds);
        let options = place.options();
        let pushed = place.store.push(&place.tenant, &source, &options).await;
        pushed.unwrap();
    }
    let sound = place.verify().await;
    assert!(sound.is_sound());
    // Each chunk is read once, although snapshots share chunks: five and one of the state.
    assert_eq!((sound.snapshots, sound.chunks), (2, 6));
    let pack = &place.files("packs")[0];
    // The index is at the end of a pack.
    flip_from_end(pack, 100);
    let found = place.verify().await;
    let [index] = &found.objects[..] else {
        panic!("{:?}", found.objects)
    };
    assert!(index.object.contains("/packs/") && index.reason.contains("index"));
    // The second flip of a bit restores the file. Only one of the two snapshots can be verified if
    // the manifest or the locations of the other one are damaged.
    flip_from_end(pack, 100);
    for (kind, snapshots) in [("locations", 1), ("manifests", 1)] {
        let file = &place.files(kind)[0];
        flip_from_end(file, 10);
        let found = place.verify().await;
        assert_eq!((found.snapshots, found.objects.len()), (snapshots, 1));
        assert!(found.objects[0].object.contains(kind), "{found:?}");
        flip_from_end(file, 10);
    }
    // Damage a chunk: the second frame of the largest pack. The header of a pack has 64 bytes, and
    // a frame has 41 bytes in addition to its chunk.
    let mut bytes = fs::read(pack).unwrap();
    bytes[64 + (CHUNK + 41) + 1000] ^= 4;
    fs::write(pack, &bytes).unwrap();
    let found = place.verify().await;
    let chunks: usize = found
        .damaged
        .iter()
        .map(|damaged| damaged.chunks.len())
        .sum();
    assert!(chunks >= 1 && found.objects.is_empty(), "{found:?}");
    fs::remove_file(pack).unwrap();
    assert!(!place.verify().await.is_sound());
}

#[tokio::test]
async fn repair_takes_chunks_from_the_cache_of_a_host_for_all_snapshots() {
    let place = Place::new().await;
    let (a, b) = (
        snapshot(place.dir.path(), &[1, 2, 3]),
        snapshot(place.dir.path(), &[3, 2, 9]),
    );
    let (store, tenant) = (&place.store, &place.tenant);
    let (a_name, _) = store.push(tenant, &a, &place.options()).await.unwrap();
    let (b_name, _) = store.push(tenant, &b, &place.options()).await.unwrap();
    let cache = LayerCache::open(place.dir.path().join("cache"), u64::MAX).unwrap();
    let cache = Arc::new(cache);
    let remote = store.open(tenant, a_name.root).await.unwrap();
    for part in 0..2 {
        let pulled = store.pull(&remote, part, Selection::All, &cache).await;
        pulled.unwrap();
    }
    // Remove the pack of the first snapshot. The second snapshot reuses two of its chunks, so both
    // snapshots are damaged.
    fs::remove_file(&place.files("packs")[0]).unwrap();
    let found = place.verify().await;
    assert_eq!(found.damaged.len(), 2);
    // A host without copies repairs nothing and reports the lost chunks.
    let empty = LayerCache::open(place.dir.path().join("empty"), u64::MAX).unwrap();
    let lost = store.repair_all(tenant, &found.damaged, &empty, SILENT);
    assert_eq!(lost.await.unwrap().len(), 2);
    let lost = store.repair_all(tenant, &found.damaged, &*cache, SILENT);
    assert!(lost.await.unwrap().is_empty());
    assert!(place.verify().await.is_sound());
    assert_same(store, tenant, a_name.root, &a).await;
    assert_same(store, tenant, b_name.root, &b).await;
}

/// A host exits at each request of a repair.
#[tokio::test]
async fn an_interrupted_repair_loses_no_chunk_and_can_be_repeated() {
    for at in 0..60 {
        let place = Place::new().await;
        let (tenant, dir) = (&place.tenant, place.dir.path());
        let sources = [snapshot(dir, &[1, 2, 3]), snapshot(dir, &[3, 2, 9])];
        let mut roots = Vec::new();
        for source in &sources {
            let pushed = place.store.push(tenant, source, &place.options()).await;
            roots.push(pushed.unwrap().0.root);
        }
        // Remove the pack of the first snapshot. The second snapshot reuses two of its chunks.
        fs::remove_file(&place.files("packs")[0]).unwrap();
        let directory = object_store::local::LocalFileSystem::new_with_prefix(dir.join("store"));
        let faulty = FaultyStore::new(Arc::new(directory.unwrap()));
        let repairing = over(faulty.clone(), quick());
        faulty.die_at(at);
        let repair = async {
            let found = repairing.verify_tenant(tenant, None, SILENT).await.unwrap();
            repairing.distrust(tenant, &found).await.unwrap();
            let repaired = repairing.repair_all(tenant, &found.damaged, &sources[0], SILENT);
            assert!(repaired.await.unwrap().is_empty());
        };
        let ended = faulty.until_death(repair).await.is_some();
        // The lock of the exited host is considered abandoned.
        let taken = GcOptions {
            lock_time: Duration::ZERO,
            ..GcOptions::default()
        };
        place.store.collect(tenant, taken).await.unwrap();
        // If one snapshot was already repaired, the other takes the shared chunks from it.
        let found = place.verify().await;
        let repaired = place
            .store
            .repair_all(tenant, &found.damaged, &sources[0], SILENT);
        assert!(repaired.await.unwrap().is_empty());
        assert!(place.verify().await.is_sound());
        for (root, source) in roots.iter().zip(&sources) {
            assert_same(&place.store, tenant, *root, source).await;
        }
        if ended {
            // With fewer requests, no repair would have been interrupted.
            assert!(at > 12, "{at} requests");
            return;
        }
    }
    panic!("the repair never ended");
}

#[tokio::test]
async fn another_push_replaces_chunks_that_were_found_damaged() {
    let place = Place::new().await;
    let (store, tenant) = (&place.store, &place.tenant);
    let source = snapshot(place.dir.path(), &[1, 2, 3]);
    let (name, _) = store.push(tenant, &source, &place.options()).await.unwrap();
    let pack = &place.files("packs")[0];
    let mut bytes = fs::read(pack).unwrap();
    // A byte of the first chunk. The header of a pack has 64 bytes.
    bytes[64 + 1000] ^= 4;
    fs::write(pack, &bytes).unwrap();
    // Pushes do not read chunks: only a verification detects the damage.
    let (_, again) = store.push(tenant, &source, &place.options()).await.unwrap();
    assert!(again.existed);
    let found = place.verify().await;
    assert!(!found.is_sound());
    store.distrust(tenant, &found).await.unwrap();
    let (_, again) = store.push(tenant, &source, &place.options()).await.unwrap();
    assert!(!again.existed);
    assert!(place.verify().await.is_sound());
    assert_same(store, tenant, name.root, &source).await;
}

#[tokio::test]
async fn a_collection_moves_sound_chunks_out_of_a_pack_whose_index_is_damaged() {
    let place = Place::new().await;
    let (store, tenant) = (&place.store, &place.tenant);
    let source = snapshot(place.dir.path(), &[1, 2, 3]);
    let (name, _) = store.push(tenant, &source, &place.options()).await.unwrap();
    flip_from_end(&place.files("packs")[0], 100);
    let found = place.verify().await;
    store.distrust(tenant, &found).await.unwrap();
    let at_once = GcOptions {
        grace: Duration::ZERO,
        ..GcOptions::default()
    };
    tokio::time::sleep(Duration::from_millis(20)).await;
    let report = store.collect(tenant, at_once).await.unwrap();
    assert_eq!(report.repacked, 1);
    tokio::time::sleep(Duration::from_millis(20)).await;
    let report = store.collect(tenant, at_once).await.unwrap();
    assert_eq!((report.repacked, report.removed), (0, 1));
    assert!(place.verify().await.is_sound());
    assert_same(store, tenant, name.root, &source).await;
}

#[tokio::test]
async fn tenants_are_listed_with_the_master_keys_and_no_others() {
    let place = Place::new().await;
    for name in ["shared", "zoe", "bob"] {
        place.store.tenant(name).await.unwrap();
    }
    let tenants = place.store.tenants().await.unwrap();
    assert_eq!(tenants.names, ["alice", "bob", "zoe", "shared"]);
    assert_eq!(tenants.foreign, 0);
    // A tenant that an earlier version created, which wrote no name.
    let name = &place
        .files("tenants")
        .into_iter()
        .find(|p| p.ends_with("name"));
    fs::remove_file(name.as_ref().unwrap()).unwrap();
    assert_eq!(place.store.tenants().await.unwrap().foreign, 1);
    for name in ["alice", "bob", "zoe", "shared"] {
        place.store.tenant(name).await.unwrap();
    }
    assert_eq!(place.store.tenants().await.unwrap(), tenants);
    let other = Keyring::parse(&format!(
        "locator = \"{}\"\ncurrent = \"k1\"\n[keys]\nk1 = \"{}\"\n",
        "b".repeat(64),
        "2".repeat(64)
    ));
    let url: StoreUrl = format!("file://{}/store", place.dir.path().display())
        .parse()
        .unwrap();
    let stranger = SharedStore::new(url.open(quick()).unwrap(), other.unwrap());
    let tenants = stranger.tenants().await.unwrap();
    assert_eq!((tenants.names.len(), tenants.foreign), (0, 4));
}

#[tokio::test]
async fn a_damaged_name_of_a_tenant_is_reported_as_damage_and_not_as_foreign() {
    let place = Place::new().await;
    place.store.tenant("bob").await.unwrap();
    let whole = place.store.tenants().await.unwrap();
    assert_eq!((whole.names.len(), whole.damaged.len()), (2, 0));
    for name in place
        .files("tenants")
        .iter()
        .filter(|p| p.ends_with("name"))
    {
        // The last 16 bytes authenticate the name. First damage the name itself, which precedes
        // them. The damage of the authentication follows at the end of this loop.
        flip_from_end(name, 18);
        let found = place.store.tenants().await.unwrap();
        assert_eq!((found.names.len(), found.foreign), (1, 0));
        let [damaged] = &found.damaged[..] else {
            panic!("{found:?}")
        };
        let expected = format!(
            "{}/name",
            name.parent().unwrap().file_name().unwrap().display()
        );
        assert!(damaged.object.ends_with(&expected), "{damaged:?}");
        fs::remove_file(name).unwrap();
        assert_eq!(place.store.tenants().await.unwrap().damaged.len(), 1);
        // Hosts that know the name write it again.
        for known in ["alice", "bob"] {
            place.store.tenant(known).await.unwrap();
        }
        assert_eq!(place.store.tenants().await.unwrap(), whole);
        flip_from_end(name, 8);
        for known in ["alice", "bob"] {
            place.store.tenant(known).await.unwrap();
        }
        assert_eq!(place.store.tenants().await.unwrap(), whole);
    }
}
