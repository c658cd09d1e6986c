//! Tests of the store of snapshots on the disk of a host.
//!
//! A *draft* is a snapshot that is not published yet. An *overlay* is the file to which a guest
//! writes the changed blocks of its disk; it becomes a layer of the snapshot. A *chunk* is 64 KiB
//! of memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod damage;
mod fold;
mod import;
mod merge_race;
mod working_set;

use jiffy_proto::layer::{DISK_BLOCK, LayerIndex, MEMORY_CHUNK};
use jiffy_snapshot::{
    DamagedChunk, DiskSizes, Durability, Manifest, MemorySizes, SNAPSHOT_FORMAT, Snapshot,
    SnapshotError, Store, VerifyResult, Versions,
};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

const MEMORY_BYTES: u64 = 4 * MEMORY_CHUNK as u64;
const DISK_BYTES: u64 = 16 * DISK_BLOCK as u64;

/// Returns an empty store in a temporary directory.
fn store() -> (TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().join("snapshots")).unwrap();
    (dir, store)
}

/// Returns the manifest of the snapshots that [`put`] publishes.
fn manifest(id: &str, parent: Option<&str>) -> Manifest {
    Manifest {
        net: false,
        modules: None,
        disk_only: false,
        format: SNAPSHOT_FORMAT,
        id: id.to_owned(),
        parent: parent.map(str::to_owned),
        template: "base".to_owned(),
        created_ms: 1_700_000_000_000,
        versions: Versions {
            vmm: "0.1.0".to_owned(),
            kernel: "6.12".to_owned(),
            agent: "0.1.0".to_owned(),
        },
        cpu: "cpu".to_owned(),
        vcpus: 1,
        memory: MemorySizes {
            bytes: MEMORY_BYTES,
            stored: 1,
            zero: 1,
            complete: false,
        },
        disks: vec![DiskSizes {
            bytes: DISK_BYTES,
            stored: 1,
        }],
    }
}

/// Publishes a snapshot with one stored and one zero chunk of memory (1 and 3), and one block (2).
fn put(store: &Store, id: &str, parent: Option<&str>) -> Result<Snapshot, SnapshotError> {
    let mut draft = store.draft(1)?;
    draft.state.write_all_at(b"state", 0).unwrap();
    draft.memory.set_len(MEMORY_BYTES).unwrap();
    draft.memory.write_all_at(&[7; 65536], 65536).unwrap();
    let mut index = LayerIndex::empty(MEMORY_CHUNK, MEMORY_BYTES);
    index.stored.insert(1);
    index.zero.insert(3);
    draft.memory_index.write_all_at(&index.encode(), 0).unwrap();
    let overlay = store.overlay()?;
    overlay.set_len(DISK_BYTES).unwrap();
    overlay.write_all_at(&[9; 4096], 2 * 4096).unwrap();
    let mut index = LayerIndex::empty(DISK_BLOCK, DISK_BYTES);
    index.stored.insert(2);
    draft.disk_indexes[0]
        .write_all_at(&index.encode(), 0)
        .unwrap();
    draft.publish(&manifest(id, parent), &[overlay], Durability::Storage)
}

/// Returns the names of all entries of the store.
fn names(store: &Store) -> Vec<String> {
    let entries = fs::read_dir(store.root()).unwrap();
    entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_snapshot_reads_back_and_its_overlay_was_not_copied() {
    let (_dir, store) = store();
    let snapshot = put(&store, "a1", None).unwrap();
    assert_eq!(store.get("a1").unwrap().manifest(), snapshot.manifest());
    assert_eq!(names(&store), ["a1"]);
    let mut block = [0; 4096];
    let disk = snapshot.disk(0).unwrap();
    disk.file.read_exact_at(&mut block, 2 * 4096).unwrap();
    assert_eq!(block, [9; 4096]);
    assert!(matches!(
        put(&store, "a1", None),
        Err(SnapshotError::Exists(_))
    ));
    assert_eq!(names(&store), ["a1"]);
}

#[test]
fn an_abandoned_draft_is_removed() {
    let (_dir, store) = store();
    drop(store.draft(1).unwrap());
    assert!(names(&store).is_empty());
    std::mem::forget(store.draft(1).unwrap());
    assert!(store.ids().unwrap().is_empty());
    // Simulates a process with an id that does not exist (pid_max, proc(5)).
    let draft = store.root().join(&names(&store)[0]);
    fs::rename(draft, store.root().join(".draft-4194305-0")).unwrap();
    assert_eq!(store.walk(SystemTime::now()).unwrap().count(), 0);
    assert!(names(&store).is_empty());
}

#[test]
fn an_overlay_of_another_file_system_is_copied_without_its_holes() {
    let (_dir, store) = store();
    let mut draft = store.draft(1).unwrap();
    draft.state.write_all_at(b"state", 0).unwrap();
    draft.memory.set_len(MEMORY_BYTES).unwrap();
    let index = LayerIndex::empty(MEMORY_CHUNK, MEMORY_BYTES);
    draft.memory_index.write_all_at(&index.encode(), 0).unwrap();
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("gone");
    let overlay = fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    fs::remove_file(&path).unwrap();
    overlay.set_len(DISK_BYTES).unwrap();
    overlay.write_all_at(&[9; 4096], 8 * 4096).unwrap();
    let mut index = LayerIndex::empty(DISK_BLOCK, DISK_BYTES);
    index.stored.insert(8);
    draft.disk_indexes[0]
        .write_all_at(&index.encode(), 0)
        .unwrap();
    let mut manifest = manifest("b", None);
    (manifest.memory.stored, manifest.memory.zero) = (0, 0);
    let snapshot = draft
        .publish(&manifest, &[overlay], Durability::PageCache)
        .unwrap();
    let file = snapshot.disk(0).unwrap().file;
    let mut block = [0; 4096];
    file.read_exact_at(&mut block, 8 * 4096).unwrap();
    assert_eq!(block, [9; 4096]);
}

#[test]
fn a_lineage_goes_from_the_oldest_ancestor_to_the_snapshot() {
    let (_dir, store) = store();
    put(&store, "a", None).unwrap();
    put(&store, "b", Some("a")).unwrap();
    put(&store, "c", Some("b")).unwrap();
    let lineage = store.lineage("c").unwrap();
    let ids: Vec<&str> = lineage.snapshots().iter().map(Snapshot::id).collect();
    assert_eq!(ids, ["a", "b", "c"]);
    assert_eq!(lineage.memory().unwrap().len(), 3);
    assert_eq!(lineage.disk(0).unwrap().len(), 3);
}

#[test]
fn a_broken_or_cyclic_lineage_is_rejected() {
    let (_dir, store) = store();
    put(&store, "a", Some("c")).unwrap();
    put(&store, "b", Some("a")).unwrap();
    assert!(
        matches!(store.lineage("b"), Err(SnapshotError::Orphan { parent, .. }) if parent == "c")
    );
    put(&store, "c", Some("b")).unwrap();
    let error = store.lineage("b").unwrap_err().to_string();
    assert!(error.contains("cycle"), "{error}");
}

#[test]
fn only_a_snapshot_without_users_and_children_is_removed() {
    let (_dir, store) = store();
    let a = put(&store, "a", None).unwrap();
    put(&store, "b", Some("a")).unwrap();
    assert!(
        matches!(store.remove("a"), Err(SnapshotError::HasChild { child, .. }) if child == "b")
    );
    let hold = store.get("b").unwrap().hold().unwrap();
    let second = store.get("b").unwrap().hold().unwrap();
    drop(hold);
    assert!(matches!(store.remove("b"), Err(SnapshotError::InUse(_))));
    drop(second);
    store.remove("b").unwrap();
    store.remove("a").unwrap();
    assert!(matches!(a.hold(), Err(SnapshotError::Missing(_))));
    assert!(matches!(store.remove("a"), Err(SnapshotError::Missing(_))));
    assert!(names(&store).is_empty());
}

#[test]
fn every_damage_is_detected_and_its_file_reported() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 9] = [
        ("manifest.json", |d| {
            fs::write(d.join("manifest.json"), b"{").unwrap()
        }),
        ("manifest.json", |d| {
            fs::write(d.join("manifest.json"), vec![b' '; 2 << 20]).unwrap()
        }),
        ("manifest.json", |d| {
            edit(d, "\"id\": \"a\"", "\"id\": \"b\"")
        }),
        ("manifest.json", |d| {
            edit(d, "\"parent\": null", "\"parent\": \"../a\"")
        }),
        ("memory.layer", |d| {
            fs::write(d.join("memory.layer"), b"short").unwrap()
        }),
        ("memory.index", |d| {
            fs::write(d.join("memory.index"), b"JIFFYIDX").unwrap()
        }),
        ("memory.index", |d| {
            edit(d, "\"stored\": 1", "\"stored\": 2")
        }),
        ("disk0.index", |d| {
            fs::remove_file(d.join("disk0.index")).unwrap()
        }),
        ("state.bin", |d| {
            fs::write(d.join("state.bin"), b"").unwrap()
        }),
    ];
    for (file, damage) in damages {
        let (_dir, store) = store();
        let snapshot = put(&store, "a", None).unwrap();
        damage(snapshot.path());
        let error = store.get("a").unwrap_err().to_string();
        assert!(error.contains(file), "{file}: {error}");
        store.remove("a").unwrap();
    }
}

/// Replaces a text in the manifest of a snapshot.
fn edit(dir: &Path, from: &str, to: &str) {
    let path = dir.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(&path, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn another_format_is_rejected_with_a_remedy() {
    let (_dir, store) = store();
    let snapshot = put(&store, "a", None).unwrap();
    edit(snapshot.path(), "\"format\": 1", "\"format\": 2");
    let error = store.get("a").unwrap_err().to_string();
    assert!(
        error.contains("format 2") && error.contains("build its template again"),
        "{error}"
    );
}

#[test]
fn names_that_are_paths_are_not_ids() {
    let (_dir, store) = store();
    for id in ["", "..", "a/b", "A", "a-b", ".draft", &"a".repeat(65)] {
        assert!(matches!(store.get(id), Err(SnapshotError::Id(_))), "{id}");
        assert!(
            matches!(store.remove(id), Err(SnapshotError::Id(_))),
            "{id}"
        );
    }
}

#[test]
fn a_flipped_byte_of_a_snapshot_with_checksums_is_reported() {
    let (_dir, store) = store();
    let snapshot = put(&store, "a", None).unwrap();
    assert_eq!(snapshot.verify().unwrap(), VerifyResult::NoChecksums);
    snapshot.write_checksums().unwrap();
    snapshot.write_checksums().unwrap();
    assert_eq!(snapshot.verify().unwrap(), VerifyResult::Intact);
    let flip = |name: &str, at: u64| {
        let path = snapshot.path().join(name);
        let file = fs::File::options().read(true).write(true).open(path);
        let file = file.unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    };
    for (name, at, chunk) in [
        ("memory.layer", 65536 + 5, Some(1)),
        ("disk0.layer", 2 * 4096 + 4095, Some(0)),
        ("state.bin", 0, None),
    ] {
        flip(name, at);
        let file = name.to_owned();
        let damages = vec![DamagedChunk { file, chunk }];
        assert_eq!(snapshot.verify().unwrap(), VerifyResult::Damaged(damages));
        flip(name, at);
    }
    assert_eq!(snapshot.verify().unwrap(), VerifyResult::Intact);
    // Holes of a layer are not verified.
    flip("memory.layer", 5);
    assert_eq!(snapshot.verify().unwrap(), VerifyResult::Intact);
}

#[test]
fn a_snapshot_may_be_removed_or_merged_while_its_checksums_are_written() {
    let (_dir, store) = store();
    for round in 0..40 {
        put(&store, "a", None).unwrap();
        let snapshot = put(&store, "b", Some("a")).unwrap();
        let start = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                // Fails if the snapshot was removed before the checksums were written.
                let _ = snapshot.write_checksums();
            });
            start.wait();
            match round % 2 {
                0 => store.remove("b").unwrap(),
                _ => drop(store.merge("b", 0).unwrap()),
            }
        });
        if round % 2 == 1 {
            let merged = store.get("b").unwrap();
            assert!(!matches!(
                merged.verify().unwrap(),
                VerifyResult::Damaged(_)
            ));
            store.remove("b").unwrap();
        }
        store.remove("a").unwrap();
        let later = SystemTime::now() + Duration::from_secs(7200);
        store.walk(later).unwrap().for_each(drop);
        assert!(names(&store).is_empty(), "{:?}", names(&store));
    }
}

/// Snapshots of every released format must load, or be rejected by a release that announces it.
#[test]
fn golden_snapshots_can_be_loaded() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/format1");
    let store = Store::open(&data).unwrap();
    let lineage = store.lineage("child").unwrap();
    let ids: Vec<&str> = lineage.snapshots().iter().map(Snapshot::id).collect();
    assert_eq!(ids, ["root", "child"]);
    assert_eq!(
        lineage.newest().unwrap().verify().unwrap(),
        VerifyResult::Intact
    );
}

/// Writes the golden snapshots of the current format. Run once per format.
#[test]
#[ignore = "writes test data"]
fn make_golden_snapshots() {
    let data =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/format{SNAPSHOT_FORMAT}"));
    let store = Store::open(&data).unwrap();
    put(&store, "root", None)
        .unwrap()
        .write_checksums()
        .unwrap();
    put(&store, "child", Some("root"))
        .unwrap()
        .write_checksums()
        .unwrap();
}

/// Publishes a snapshot whose memory chunk `chunk` is filled with `byte`, and whose chunk `zeroed`
/// is zero.
fn put_chunk(store: &Store, id: &str, parent: Option<&str>, (chunk, byte, zeroed): (u64, u8, u64)) {
    let mut draft = store.draft(1).unwrap();
    draft.state.write_all_at(id.as_bytes(), 0).unwrap();
    draft.memory.set_len(MEMORY_BYTES).unwrap();
    let content = [byte; MEMORY_CHUNK as usize];
    draft
        .memory
        .write_all_at(&content, chunk * u64::from(MEMORY_CHUNK))
        .unwrap();
    let mut index = LayerIndex::empty(MEMORY_CHUNK, MEMORY_BYTES);
    index.stored.insert(chunk);
    index.zero.insert(zeroed);
    draft.memory_index.write_all_at(&index.encode(), 0).unwrap();
    let overlay = store.overlay().unwrap();
    overlay.set_len(DISK_BYTES).unwrap();
    overlay.write_all_at(&[byte; 4096], chunk * 4096).unwrap();
    let mut index = LayerIndex::empty(DISK_BLOCK, DISK_BYTES);
    index.stored.insert(chunk);
    draft.disk_indexes[0]
        .write_all_at(&index.encode(), 0)
        .unwrap();
    let manifest = manifest(id, parent);
    draft
        .publish(&manifest, &[overlay], Durability::PageCache)
        .unwrap();
}

#[test]
fn a_merged_snapshot_has_the_same_content_without_its_ancestors() {
    let (_dir, store) = store();
    put_chunk(&store, "a", None, (0, 1, 3));
    put_chunk(&store, "b", Some("a"), (1, 2, 0));
    put_chunk(&store, "c", Some("b"), (2, 3, 3));
    put_chunk(&store, "d", Some("c"), (1, 4, 3));
    let before = store.get("d").unwrap().memory().unwrap();
    let merged = store.merge("d", 0).unwrap();
    assert_eq!(merged.manifest().parent, None);
    assert_eq!(store.lineage("d").unwrap().snapshots().len(), 1);
    let byte = |file: &fs::File, at: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        byte[0]
    };
    let memory = merged.memory().unwrap();
    let bytes: Vec<u8> = (0..4)
        .map(|n| byte(&memory.file, (n + 1) * u64::from(MEMORY_CHUNK) - 1))
        .collect();
    // Chunk 0 was written by `a` and zeroed by `b`. Chunk 1 was written by `b` and again by `d`.
    assert_eq!(bytes, [0, 4, 3, 0]);
    assert_eq!(merged.manifest().memory.stored, 2);
    let disk = merged.disk(0).unwrap();
    assert_eq!([0, 1, 2].map(|n| byte(&disk.file, n * 4096)), [1, 4, 3]);
    // Old open files remain readable, the ancestors can be removed, and no other file remains.
    assert_eq!(byte(&before.file, u64::from(MEMORY_CHUNK)), 4);
    for id in ["c", "b", "a"] {
        store.remove(id).unwrap();
    }
    assert_eq!(names(&store), ["d"]);
    assert_eq!(store.merge("d", 0).unwrap().manifest(), merged.manifest());
}

#[test]
fn a_snapshot_merged_with_the_nearest_of_its_ancestors_has_the_same_content_above_the_others() {
    let (_dir, store) = store();
    put_chunk(&store, "a", None, (0, 1, 3));
    put_chunk(&store, "b", Some("a"), (1, 2, 0));
    put_chunk(&store, "c", Some("b"), (2, 3, 3));
    put_chunk(&store, "d", Some("c"), (1, 4, 3));
    let lineage = store.lineage("d").unwrap();
    let bytes = |id: &str| store.get(id).unwrap().bytes().unwrap();
    let two = bytes("c") + bytes("d");
    assert_eq!(lineage.oldest_to_merge(two), 2);
    assert_eq!(lineage.oldest_to_merge(two - 1), 3);
    assert_eq!(lineage.oldest_to_merge(0), 3);
    assert_eq!(lineage.oldest_to_merge(u64::MAX), 1);

    let merged = store.merge("d", 1).unwrap();
    assert_eq!(merged.manifest().parent.as_deref(), Some("a"));
    let ids = |id: &str| -> Vec<String> {
        let lineage = store.lineage(id).unwrap();
        lineage
            .snapshots()
            .iter()
            .map(|s| s.id().to_owned())
            .collect()
    };
    assert_eq!(ids("d"), ["a", "d"]);
    // Chunk 0 was written by `a` and zeroed by `b`: the old content must not reappear.
    let index = jiffy_snapshot::read_index(&merged.memory().unwrap().index).unwrap();
    assert_eq!(index.stored.iter().collect::<Vec<_>>(), [1, 2]);
    assert!(index.zero.contains(0) && merged.manifest().memory.zero == index.zero.count());
    let disk = merged.disk(0).unwrap();
    let byte = |file: &fs::File, at: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        byte[0]
    };
    assert_eq!([1, 2].map(|n| byte(&disk.file, n * 4096)), [4, 3]);
    let index = jiffy_snapshot::read_index(&disk.index).unwrap();
    assert_eq!(index.stored.iter().collect::<Vec<_>>(), [1, 2]);
    // The merged ancestors can be removed, the remaining ancestor cannot.
    for id in ["c", "b"] {
        store.remove(id).unwrap();
    }
    let result = store.remove("a");
    assert!(matches!(result, Err(SnapshotError::HasChild { .. })));
    assert_eq!(store.merge("d", 1).unwrap().manifest(), merged.manifest());
    assert_eq!(store.merge("d", 0).unwrap().manifest().parent, None);
    store.remove("a").unwrap();
}
