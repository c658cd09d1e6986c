//! Recorded sets of snapshots.
//!
//! The *working set* contains the chunks of memory that a restored guest touches first. The
//! *written pages* are the pages that a restored guest writes until its first command ends. The
//! *first use pages* are written until its first use ends: the request or command with which most
//! uses of its template start. A *chunk* is 64 KiB of memory.

use super::*;
use jiffy_proto::layer::MEMORY_PAGE;
use jiffy_snapshot::read_index;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Returns a file with a working set, for a memory of `bytes`.
fn working_set(chunks: &[u64], bytes: u64) -> fs::File {
    recorded_set(MEMORY_CHUNK, chunks, bytes)
}

/// Returns a file with a set of units, which are chunks or pages.
fn recorded_set(unit: u32, units: &[u64], bytes: u64) -> fs::File {
    let mut set = LayerIndex::empty(unit, bytes);
    units.iter().for_each(|&c| set.stored.insert(c));
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&set.encode(), 0).unwrap();
    file
}

#[test]
fn a_working_set_is_used_by_its_snapshot_and_descendants() {
    let (_dir, store) = store();
    let root = put(&store, "root", None).unwrap();
    put(&store, "child", Some("root")).unwrap();
    let lineage = || store.lineage("child").unwrap();
    assert!(lineage().working_set().unwrap().is_none());
    root.put_working_set(&working_set(&[1], MEMORY_BYTES))
        .unwrap();
    // An existing working set is not replaced.
    root.put_working_set(&working_set(&[2], MEMORY_BYTES))
        .unwrap();
    let (set, _) = lineage().working_set().unwrap().unwrap();
    assert_eq!(set.iter().collect::<Vec<_>>(), [1]);
    let error = root.put_working_set(&working_set(&[1], MEMORY_BYTES * 2));
    assert!(error.unwrap_err().to_string().contains("another size"));
    assert!(lineage().written_pages().unwrap().is_none());
    assert!(
        root.put_written_pages(&working_set(&[1], MEMORY_BYTES))
            .is_err()
    );
    // Page 16 is the first page of chunk 1.
    let written = recorded_set(MEMORY_PAGE, &[16], MEMORY_BYTES);
    root.put_written_pages(&written).unwrap();
    let pages = lineage().written_pages().unwrap().unwrap();
    assert!(pages.first_use.is_none());
    let first_use = recorded_set(MEMORY_PAGE, &[16, 17], MEMORY_BYTES);
    root.put_first_use_pages(&first_use).unwrap();
    let pages = lineage().written_pages().unwrap().unwrap();
    assert!(pages.first_use.is_some());
    root.write_checksums().unwrap();
    fs::write(root.path().join("working-set.index"), b"JIFFYIDX").unwrap();
    assert!(lineage().working_set().is_err());
    // A damaged working set does not damage the snapshot.
    assert_eq!(root.verify().unwrap(), VerifyResult::Intact);
}

#[test]
fn the_written_pages_of_the_largest_guest_are_recorded() {
    const LARGEST: u64 = 64 << 30;
    let (_dir, store) = store();
    let mut draft = store.draft(0).unwrap();
    draft.state.write_all_at(b"state", 0).unwrap();
    draft.memory.set_len(LARGEST).unwrap();
    let index = LayerIndex::empty(MEMORY_CHUNK, LARGEST);
    index.write(&draft.memory_index).unwrap();
    let mut manifest = manifest("root", None);
    manifest.memory = MemorySizes {
        bytes: LARGEST,
        stored: 0,
        zero: 0,
        complete: false,
    };
    manifest.disks.clear();
    let root = draft
        .publish(&manifest, &[], Durability::PageCache)
        .unwrap();
    let last = LARGEST / u64::from(MEMORY_PAGE) - 1;
    root.put_written_pages(&recorded_set(MEMORY_PAGE, &[last], LARGEST))
        .unwrap();
    let lineage = store.lineage("root").unwrap();
    let pages = lineage.written_pages().unwrap().unwrap();
    let index = read_index(&pages.first_command).unwrap();
    assert_eq!(index.stored.iter().collect::<Vec<_>>(), [last]);
}

/// Returns the number of pages of `file` in the page cache.
fn cached(file: &fs::File) -> usize {
    let length = usize::try_from(file.metadata().unwrap().len()).unwrap();
    let mut pages = vec![0u8; length / 4096];
    let fd = std::os::fd::AsRawFd::as_raw_fd(file);
    // SAFETY: a read-only mapping of the file that is unmapped before this function returns, and a
    // vector with one byte per page.
    unsafe {
        let map = libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ,
            libc::MAP_SHARED,
            fd,
            0,
        );
        assert_ne!(map, libc::MAP_FAILED);
        assert_eq!(libc::mincore(map, length, pages.as_mut_ptr()), 0);
        libc::munmap(map, length);
    }
    pages.iter().filter(|&page| page & 1 == 1).count()
}

/// Removes `layer` from the page cache. Returns `false` if its file system stores files in memory.
fn reclaim(layer: &fs::File) -> bool {
    layer.sync_all().unwrap();
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    nix::fcntl::posix_fadvise(layer, 0, 0, advice).unwrap();
    cached(layer) == 0
}

/// Opens the file with the memory of a snapshot.
fn layer(snapshot: &Snapshot) -> fs::File {
    fs::File::open(snapshot.path().join("memory.layer")).unwrap()
}

#[test]
fn a_reclaimed_working_set_is_prefetched_again() {
    let test = "a_reclaimed_working_set_is_prefetched_again";
    let (_dir, store) = store();
    let root = put(&store, "root", None).unwrap();
    root.put_working_set(&working_set(&[1, 2], MEMORY_BYTES))
        .unwrap();
    let layer = layer(&root);
    if !reclaim(&layer) {
        eprintln!("SKIPPED {test}: this file system keeps files in memory");
        return;
    }
    // Chunk 1 is in the set and stored; chunk 2 is only in the set. A chunk has 64 KiB, in 16
    // pages.
    assert_eq!(store.lineage("root").unwrap().prefetch().unwrap(), 65536);
    assert_eq!(cached(&layer), 16);
}

#[test]
fn a_working_set_is_read_ahead_from_the_layers_that_are_not_in_memory() {
    let test = "a_working_set_is_read_ahead_from_the_layers_that_are_not_in_memory";
    let (_dir, store) = store();
    put_chunk(&store, "root", None, (0, 1, 3));
    put_chunk(&store, "child", Some("root"), (1, 2, 3));
    let [root, child] = ["root", "child"].map(|id| store.get(id).unwrap());
    let touched = working_set(&[0, 1, 2, 3], MEMORY_BYTES);
    assert!(child.put_touched(&touched).unwrap());
    let lineage = store.lineage("child").unwrap();
    let layers = [layer(&root), layer(&child)];
    if !layers.iter().all(reclaim) {
        eprintln!("SKIPPED {test}: this file system keeps files in memory");
        return;
    }
    let wait_until_cached = |layer: &fs::File| {
        let limit = Instant::now() + Duration::from_secs(10);
        while cached(layer) < 16 && Instant::now() < limit {
            std::thread::yield_now();
        }
        assert_eq!(cached(layer), 16);
    };
    // One chunk of each layer is stored; the other chunks are zero.
    assert_eq!(lineage.read_ahead().unwrap(), 2 * 65536);
    layers.iter().for_each(wait_until_cached);
    assert_eq!(lineage.read_ahead().unwrap(), 0);
    assert!(reclaim(&layers[1]));
    assert_eq!(lineage.read_ahead().unwrap(), 65536);
    wait_until_cached(&layers[1]);
}

#[test]
fn touched_chunks_are_stored_unless_there_are_too_few_or_too_many() {
    let (_dir, store) = store();
    let root = put(&store, "root", None).unwrap();
    // Rejected: an empty file, which earlier VMMs leave, an index without chunks, and an index with
    // more than the maximum of 1,024 chunks. A guest with more chunks did more than resume.
    let all: Vec<u64> = (0..1025).collect();
    for none in [
        tempfile::tempfile().unwrap(),
        working_set(&[], MEMORY_BYTES),
        working_set(&all, 2048 * u64::from(MEMORY_CHUNK)),
    ] {
        assert!(!root.put_touched(&none).unwrap());
    }
    assert!(root.working_set().unwrap().is_none());
    assert!(root.put_touched(&working_set(&[1], MEMORY_BYTES)).unwrap());
    assert!(root.working_set().unwrap().is_some());
}

#[test]
fn a_merged_snapshot_retains_the_working_set_of_its_lineage() {
    let (_dir, store) = store();
    put_chunk(&store, "root", None, (0, 1, 3));
    put_chunk(&store, "child", Some("root"), (1, 2, 3));
    let root = store.get("root").unwrap();
    root.put_working_set(&working_set(&[0, 1], MEMORY_BYTES))
        .unwrap();
    let written = recorded_set(MEMORY_PAGE, &[16], MEMORY_BYTES);
    root.put_written_pages(&written).unwrap();
    root.put_first_use_pages(&written).unwrap();
    let merged = store.merge("child", 0).unwrap();
    let (set, _) = merged.working_set().unwrap().unwrap();
    assert_eq!(set.iter().collect::<Vec<_>>(), [0, 1]);
    let lineage = store.lineage("child").unwrap();
    assert_eq!(lineage.snapshots().len(), 1);
    let pages = lineage.written_pages().unwrap().unwrap();
    assert!(pages.first_use.is_some());
}

#[test]
fn a_folded_snapshot_retains_the_newest_sets_of_both() {
    let (_dir, store) = store();
    put_chunk(&store, "root", None, (0, 1, 3));
    put_chunk(&store, "child", Some("root"), (1, 2, 3));
    let (root, child) = (store.get("root").unwrap(), store.get("child").unwrap());
    root.put_working_set(&working_set(&[0, 1], MEMORY_BYTES))
        .unwrap();
    let written = recorded_set(MEMORY_PAGE, &[16], MEMORY_BYTES);
    root.put_written_pages(&written).unwrap();
    child
        .put_working_set(&working_set(&[2], MEMORY_BYTES))
        .unwrap();
    let fold = store.prepare_fold("child", 1 << 20, &mut |_| ControlFlow::Continue(()));
    fold.unwrap().unwrap().commit().unwrap();
    store.remove("root").unwrap();
    let (set, _) = store.get("child").unwrap().working_set().unwrap().unwrap();
    assert_eq!(set.iter().collect::<Vec<_>>(), [2]);
    let lineage = store.lineage("child").unwrap();
    assert_eq!(lineage.snapshots().len(), 1);
    assert!(lineage.written_pages().unwrap().is_some());
}
