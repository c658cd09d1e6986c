//! Folds preserve content and reclaim space, and are safe if the process is killed at any step.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.
//!
//! A *fold* copies the content that only the parent of a snapshot stores into the snapshot, so that
//! the parent can be removed.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores. A *unit* is the smallest
//! part that a layer stores: a chunk of 64 KiB of memory, or a block of 4 KiB of a disk.

use super::*;
use jiffy_proto::layer::UnitSet;
use jiffy_proto::snapshot::FileIdentity;
use jiffy_snapshot::{Fold, SnapshotLayer, read_index};
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

/// Sizes of the memory and the disk of the snapshots in this file, in units and in bytes.
const CHUNKS: u64 = 64;
const BLOCKS: u64 = 256;
const FOLD_MEMORY: u64 = CHUNKS * MEMORY_CHUNK as u64;
const FOLD_DISK: u64 = BLOCKS * DISK_BLOCK as u64;

/// Content of a layer: units with the value that fills them. 0 marks a unit as zero.
type Units = Vec<(u64, u8)>;

/// Publishes a snapshot whose layers contain `memory` and `disk`.
fn publish(store: &Store, id: &str, parent: Option<&str>, memory: &Units, disk: &Units) {
    publish_with(store, id, parent, memory, disk, |manifest| {
        assert!(!manifest.disk_only);
    });
}

/// Like [`publish`]. `change` changes the manifest before it is written.
fn publish_with(
    store: &Store,
    id: &str,
    parent: Option<&str>,
    memory: &Units,
    disk: &Units,
    change: impl FnOnce(&mut Manifest),
) {
    let mut draft = store.draft(1).unwrap();
    let overlay = store.overlay().unwrap();
    let mut indexes = Vec::new();
    for (file, unit, bytes, units) in [
        (&draft.memory, MEMORY_CHUNK, FOLD_MEMORY, memory),
        (&overlay, DISK_BLOCK, FOLD_DISK, disk),
    ] {
        file.set_len(bytes).unwrap();
        let mut index = LayerIndex::empty(unit, bytes);
        for &(number, value) in units {
            match value {
                0 if unit == MEMORY_CHUNK => index.zero.insert(number),
                _ => {
                    index.stored.insert(number);
                    let content = vec![value; unit as usize];
                    file.write_all_at(&content, number * u64::from(unit))
                        .unwrap();
                }
            }
        }
        indexes.push(index);
    }
    draft
        .memory_index
        .write_all_at(&indexes[0].encode(), 0)
        .unwrap();
    draft.disk_indexes[0]
        .write_all_at(&indexes[1].encode(), 0)
        .unwrap();
    let mut manifest = manifest(id, parent);
    manifest.memory = MemorySizes {
        bytes: FOLD_MEMORY,
        stored: indexes[0].stored.count(),
        zero: indexes[0].zero.count(),
        complete: false,
    };
    manifest.disks = vec![DiskSizes {
        bytes: FOLD_DISK,
        stored: indexes[1].stored.count(),
    }];
    change(&mut manifest);
    if !manifest.disk_only {
        draft.state.write_all_at(id.as_bytes(), 0).unwrap();
    }
    draft
        .publish(&manifest, &[overlay], Durability::PageCache)
        .unwrap();
}

/// Returns the content that a guest sees through `layers`, oldest first: the first byte of each
/// unit. Checks that the whole unit has this value.
fn view(layers: &[(SnapshotLayer, LayerIndex)], units: u64, unit: u32) -> Vec<u8> {
    let mut buffer = vec![0; unit as usize];
    (0..units)
        .map(|number| {
            let top = layers.iter().rev().find(|(_, i)| i.decides(number));
            let Some((layer, _)) = top.filter(|(_, i)| i.stored.contains(number)) else {
                return 0;
            };
            let at = number * u64::from(unit);
            layer.file.read_exact_at(&mut buffer, at).unwrap();
            assert!(
                buffer.iter().all(|byte| *byte == buffer[0]),
                "unit {number}"
            );
            buffer[0]
        })
        .collect()
}

/// Opens the files and indexes of memory and disk of a lineage.
fn open(store: &Store, id: &str) -> [Vec<(SnapshotLayer, LayerIndex)>; 2] {
    let lineage = store.lineage(id).unwrap();
    let with_index = |layers: Vec<SnapshotLayer>| {
        let layers = layers.into_iter().map(|layer| {
            let index = read_index(&layer.index).unwrap();
            (layer, index)
        });
        layers.collect()
    };
    [
        with_index(lineage.memory().unwrap()),
        with_index(lineage.disk(0).unwrap()),
    ]
}

/// Returns the contents of memory and disk that a guest sees, like [`view`].
fn seen(layers: &[Vec<(SnapshotLayer, LayerIndex)>; 2]) -> [Vec<u8>; 2] {
    [
        view(&layers[0], CHUNKS, MEMORY_CHUNK),
        view(&layers[1], BLOCKS, DISK_BLOCK),
    ]
}

/// Prepares the fold of the parent of `id` into it. Returns `None` if the copy would be larger than
/// the content of `id`.
fn fold(store: &Store, id: &str) -> Option<Fold> {
    store
        .prepare_fold(id, 0, &mut |_| ControlFlow::Continue(()))
        .unwrap()
}

/// Returns the disk space of all snapshots, in bytes.
fn allocated(store: &Store) -> u64 {
    let mut bytes = 0;
    for snapshot in fs::read_dir(store.root()).unwrap() {
        for file in fs::read_dir(snapshot.unwrap().path()).unwrap() {
            bytes += file.unwrap().metadata().unwrap().blocks() * 512;
        }
    }
    bytes
}

/// Pseudorandom numbers, reproducible for a seed.
struct Numbers(u64);

impl Numbers {
    /// Returns a number below `limit`.
    fn below(&mut self, limit: u64) -> u64 {
        // A linear congruential generator (Knuth, MMIX).
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }

    /// Returns at most `count` random units of `of` units. A value is 0 only if `zeroes`.
    fn units(&mut self, count: u64, of: u64, zeroes: bool) -> Units {
        let mut set = UnitSet::empty(of);
        (0..count).for_each(|_| set.insert(self.below(of)));
        let lowest = u64::from(!zeroes);
        set.iter()
            .map(|unit| (unit, (lowest + self.below(250)) as u8))
            .collect()
    }
}

#[test]
fn folds_preserve_the_content_of_all_descendants() {
    for seed in 0..15 {
        let (_dir, store) = store();
        let mut numbers = Numbers(seed);
        let mut parent: Option<String> = None;
        let ids = ["t", "a", "b", "c", "d"];
        for id in ids {
            let count = 4 + numbers.below(24);
            let memory = numbers.units(count, CHUNKS, true);
            let disk = numbers.units(count * 2, BLOCKS, false);
            publish(&store, id, parent.as_deref(), &memory, &disk);
            parent = Some(id.to_owned());
        }
        let open_files = open(&store, "d");
        let expected = seen(&open_files);
        // Fold in random order. The template `t` remains.
        let mut remaining = vec!["b", "c", "d"];
        while !remaining.is_empty() {
            let at = numbers.below(remaining.len() as u64) as usize;
            let id = remaining.remove(at);
            if store.get(id).is_err() {
                continue;
            }
            // Already folded, or a child of the template.
            let Some(fold) = fold(&store, id).filter(|fold| fold.parent() != "t") else {
                continue;
            };
            let parent = fold.parent().to_owned();
            let before = [seen(&open(&store, "d")), seen(&open_files)];
            let folded = fold.commit().unwrap();
            assert_ne!(folded.lower.memory, folded.upper.memory);
            assert_eq!(before, [expected.clone(), expected.clone()], "seed {seed}");
            assert_eq!(seen(&open(&store, "d")), expected, "seed {seed}");
            // Files that were opened earlier have the same content.
            assert_eq!(seen(&open_files), expected, "seed {seed}");
            store.remove(&parent).unwrap();
        }
        assert_eq!(seen(&open(&store, "d")), expected);
        assert_eq!(names(&store).len(), store.ids().unwrap().len());
    }
}

#[test]
fn memory_after_a_boot_from_a_disk_does_not_depend_on_the_parent() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let is_complete = |id: &str| store.get(id).unwrap().manifest().memory.complete;
    let memory: Units = (0..32).map(|number| (number, 7)).collect();
    publish(&store, "full", None, &memory, &vec![(1, 1)]);
    publish_with(
        &store,
        "disk",
        Some("full"),
        &vec![],
        &vec![(2, 2)],
        |manifest| {
            manifest.disk_only = true;
            manifest.memory.complete = true;
        },
    );
    publish_with(
        &store,
        "booted",
        Some("disk"),
        &vec![(3, 3)],
        &vec![(3, 3)],
        |manifest| {
            manifest.memory.complete = true;
        },
    );
    publish(&store, "last", Some("booted"), &vec![(4, 4)], &vec![(4, 4)]);
    let expected = seen(&open(&store, "last"));
    assert_eq!(expected[0].iter().filter(|byte| **byte != 0).count(), 2);
    assert_eq!(expected[1][..5], [0, 1, 2, 3, 4]);
    let lineage = store.lineage("last").unwrap();
    assert_eq!(lineage.memory_snapshots().len(), 2);

    // A fold copies no memory that the guest does not use.
    let before = allocated(&store);
    fold(&store, "disk").unwrap().commit().unwrap();
    store.remove("full").unwrap();
    assert!(allocated(&store) + 30 * u64::from(MEMORY_CHUNK) < before);
    assert!(store.get("disk").unwrap().manifest().disk_only);
    assert_eq!(seen(&open(&store, "last")), expected);
    // The snapshot that a complete memory is folded into becomes complete.
    fold(&store, "last").unwrap().commit().unwrap();
    store.remove("booted").unwrap();
    assert!(is_complete("last"));
    assert_eq!(seen(&open(&store, "last")), expected);

    publish(&store, "newest", Some("last"), &vec![(5, 5)], &vec![(5, 5)]);
    let expected = seen(&open(&store, "newest"));
    store.merge("newest", 1).unwrap();
    assert!(is_complete("newest"));
    assert_eq!(seen(&open(&store, "newest")), expected);
    store.merge("newest", 0).unwrap();
    assert!(!is_complete("newest"));
    assert_eq!(seen(&open(&store, "newest")), expected);
}

#[test]
fn a_chain_of_removed_snapshots_takes_the_space_of_its_content() {
    let (_dir, store) = store();
    publish(&store, "t", None, &vec![(0, 1)], &vec![]);
    let mut parent = "t".to_owned();
    for round in 1..=50u8 {
        let id = format!("s{round}");
        // Each round writes 16 chunks and 32 blocks again, and one new chunk and block.
        let mut memory: Units = (8..24).map(|chunk| (chunk, round)).collect();
        memory.push((u64::from(round) % 40 + 24, round));
        let mut disk: Units = (0..32).map(|block| (block, round)).collect();
        disk.push((40 + u64::from(round), round));
        publish(&store, &id, Some(&parent), &memory, &disk);
        parent = id.clone();
        if round % 10 != 0 {
            continue;
        }
        // Remove the parents after the folds, like a host.
        let mut removed = Vec::new();
        while let Some(fold) = fold(&store, &id).filter(|fold| fold.parent() != "t") {
            removed.push(fold.parent().to_owned());
            fold.commit().unwrap();
        }
        assert!(removed.len() >= 9, "{removed:?}");
        removed.iter().for_each(|id| store.remove(id).unwrap());
    }
    // The template, the newest snapshot, and snapshots with more content than their children
    // remain.
    let length = store.lineage("s50").unwrap().snapshots().len();
    assert!((2..=4).contains(&length), "{length} snapshots");
    let [memory, disk] = seen(&open(&store, "s50"));
    assert_eq!(
        (memory[8], memory[24 + 10], disk[0], disk[41]),
        (50, 50, 50, 1)
    );
    // The content has 57 chunks and 82 blocks, which are 4 MiB. The 50 rounds wrote 60 MiB.
    let bytes = allocated(&store);
    assert!((3 << 20..7 << 20).contains(&bytes), "{bytes} bytes");
    // The reported sizes are the sizes on disk, without the manifests.
    let lineage = store.lineage("s50").unwrap();
    let reported = lineage.snapshots().iter().map(|s| s.bytes().unwrap());
    let reported: u64 = reported.sum();
    assert!(
        (bytes - (64 << 10)..=bytes).contains(&reported),
        "{reported} of {bytes} bytes"
    );
    assert_eq!(store.find_damage("s50").map(|e| e.to_string()), None);
}

#[test]
fn a_rejected_or_cancelled_fold_changes_nothing() {
    let (_dir, store) = store();
    let filled = |range: std::ops::Range<u64>, value| range.map(|unit| (unit, value)).collect();
    publish(&store, "t", None, &filled(0..4, 1), &vec![]);
    publish(
        &store,
        "large",
        Some("t"),
        &filled(0..60, 2),
        &filled(0..200, 2),
    );
    publish(&store, "small", Some("large"), &filled(60..62, 3), &vec![]);
    let trace = |store: &Store| (names(store).len(), allocated(store));
    let before = trace(&store);
    // 4.5 MiB would be copied for a snapshot of 128 KiB.
    let with_limit = |limit| {
        let fold = store.prepare_fold("small", limit, &mut |_| ControlFlow::Continue(()));
        fold.unwrap()
    };
    assert!(with_limit(0).is_none() && with_limit(4 << 20).is_none());
    assert!(with_limit(5 << 20).is_some());
    assert_eq!(trace(&store), before);
    // The snapshot has no parent.
    assert!(fold(&store, "t").is_none());
    publish(&store, "sibling", Some("large"), &filled(0..60, 4), &vec![]);
    publish(
        &store,
        "equal",
        Some("sibling"),
        &filled(20..64, 5),
        &vec![],
    );
    // The parent has another child.
    assert!(fold(&store, "sibling").is_none());
    let with_others = trace(&store);
    let cancelled = store.prepare_fold("equal", 0, &mut |_| ControlFlow::Break(()));
    assert!(cancelled.unwrap().is_none());
    assert_eq!(trace(&store), with_others);
    drop(fold(&store, "equal").unwrap());
    assert_eq!(trace(&store), with_others);
    assert_ne!(before, with_others);

    // A snapshot that was replaced meanwhile remains unchanged.
    let prepared = fold(&store, "equal").unwrap();
    store.merge("equal", 1).unwrap();
    let merged = store.manifest("equal").unwrap();
    assert!(prepared.commit().is_err());
    assert_eq!(store.manifest("equal").unwrap(), merged);
}

#[test]
fn a_folded_snapshot_reports_the_files_that_a_guest_has_open() {
    let (_dir, store) = store();
    publish(&store, "t", None, &vec![(0, 1)], &vec![]);
    publish(&store, "a", Some("t"), &vec![(1, 2)], &vec![(1, 2)]);
    publish(&store, "b", Some("a"), &vec![(2, 3)], &vec![(2, 3)]);
    let open_files = open(&store, "b");
    let folded = fold(&store, "b").unwrap().commit().unwrap();
    let identity = |layer: &SnapshotLayer| {
        let metadata = layer.file.metadata().unwrap();
        FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    };
    assert_eq!(folded.lower.memory, identity(&open_files[0][1].0));
    assert_eq!(folded.upper.memory, identity(&open_files[0][2].0));
    assert_eq!(folded.lower.disks, [identity(&open_files[1][1].0)]);
    assert_eq!(folded.upper.disks, [identity(&open_files[1][2].0)]);
    // The identities are the identities of the snapshot's files.
    assert_eq!(folded.upper.memory, identity(&open(&store, "b")[0][1].0));
}

/// Environment variable for the child process of
/// [`a_process_killed_during_a_fold_leaves_a_complete_snapshot`]. It contains the *order*: the
/// number of the step at which the child kills itself, a space, and the directory of the store.
const KILL_AT: &str = "JIFFY_TEST_FOLD_KILL_AT";

#[test]
fn a_process_killed_during_a_fold_leaves_a_complete_snapshot() {
    if let Ok(order) = std::env::var(KILL_AT) {
        return fold_and_die(&order);
    }
    let mut survived = 0;
    for step in 0..8 {
        let (_dir, store) = store();
        let filled = |range: std::ops::Range<u64>, value| range.map(|unit| (unit, value)).collect();
        publish(&store, "t", None, &filled(0..4, 1), &vec![]);
        publish(&store, "a", Some("t"), &filled(0..40, 2), &filled(0..9, 2));
        publish(
            &store,
            "b",
            Some("a"),
            &filled(30..64, 3),
            &filled(5..20, 3),
        );
        let open_files = open(&store, "b");
        let expected = seen(&open_files);
        let this = "fold::a_process_killed_during_a_fold_leaves_a_complete_snapshot";
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", this, "--nocapture"])
            .env(KILL_AT, format!("{step} {}", store.root().display()))
            .output()
            .unwrap()
            .status;
        survived += u32::from(status.signal() != Some(libc::SIGKILL));

        // Simulates the next process.
        let store = Store::open(store.root()).unwrap();
        assert_eq!(seen(&open(&store, "b")), expected, "step {step}");
        assert_eq!(seen(&open_files), expected, "step {step}");
        assert_eq!(store.find_damage("b").map(|e| e.to_string()), None);
        // Repeat the fold, unless it was complete.
        if store.manifest("b").unwrap().parent.as_deref() == Some("a") {
            fold(&store, "b").unwrap().commit().unwrap();
        }
        store.remove("a").unwrap();
        assert_eq!(seen(&open(&store, "b")), expected, "step {step}");
        assert_eq!(store.walk(SystemTime::now()).unwrap().count(), 2);
        assert_eq!(names(&store).len(), 2, "step {step}");
    }
    // The last steps are not reached, so all steps were tested.
    assert!((1..8).contains(&survived), "{survived} of 8");
}

/// Folds `a` into `b` in the store of `order` ([`KILL_AT`]), and kills this process at its step.
/// The steps are the pieces of the copy, and the moments before and after the commit.
fn fold_and_die(order: &str) {
    let (step, root) = order.split_once(' ').unwrap();
    let mut remaining: u32 = step.parse().unwrap();
    let mut step = move || {
        if remaining == 0 {
            // SAFETY: kills this process immediately.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        remaining -= 1;
    };
    let store = Store::open(root).unwrap();
    let fold = store.prepare_fold("b", 0, &mut |_| {
        step();
        ControlFlow::Continue(())
    });
    let fold = fold.unwrap().unwrap();
    step();
    fold.commit().unwrap();
    step();
}
