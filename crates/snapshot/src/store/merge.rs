//! Merge of a snapshot with its ancestors, or with some of them.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. A *layer* is the
//! part of a memory or disk that one snapshot stores: the content that differs from its ancestors.
//! A *draft* is the directory of a snapshot that is not published yet. A *unit* is the smallest
//! part that a layer stores: a chunk of 64 KiB of memory, or a block of 4 KiB of a disk. A layer
//! *decides* a unit that it stores or marks as zero.
//!
//! A sandbox with many snapshots has a long lineage, and every layer slows a restore down. A merged
//! snapshot has the content of several layers under the same id. Its parent is the ancestor below
//! these layers, if any. A sandbox that uses the old files keeps them open: their content is the
//! same.

use crate::draft::{SnapshotDraft, sync_dir};
use crate::manifest::Manifest;
use crate::snapshot::{MANIFEST, disk_layer, read_index};
use crate::{Snapshot, SnapshotError, SnapshotLayer, Store};
use jiffy_proto::layer::{DISK_BLOCK, LayerIndex, MEMORY_CHUNK, UnitSet};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Maximum number of bytes copied by one call. Each call ends at a multiple of this size, so that
/// the page cache contains whole huge pages, which can be mapped into guests.
const COPY_BYTES: u64 = 4 << 20;

impl Store {
    /// Merges snapshot `id` with its ancestors, down to index `oldest` in its lineage (0 is the
    /// oldest ancestor). Does nothing if there are no such ancestors. If the process is killed or
    /// the host loses power, either the old or the new snapshot remains. The caller must prevent
    /// other merges and all folds ([`Store::prepare_fold`]) until this call returns.
    pub fn merge(&self, id: &str, oldest: usize) -> Result<Snapshot, SnapshotError> {
        let lineage = self.lineage(id)?;
        let newest = self.get(id)?;
        let merged_snapshots = lineage.snapshots().get(oldest..).unwrap_or_default();
        if merged_snapshots.len() < 2 {
            return Ok(newest);
        }
        // The memory of snapshots below this index is not part of the newest snapshot.
        let memory_start = lineage.memory_start();
        for snapshot in lineage.snapshots().iter().skip(oldest.max(memory_start)) {
            snapshot.check_complete()?;
        }
        let below = oldest
            .checked_sub(1)
            .and_then(|at| lineage.snapshots().get(at));
        let is_based = below.is_some();
        let mut manifest = newest.manifest().clone();
        let draft = self.draft(manifest.disks.len())?;
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |e| SnapshotError::io(&path)(e)
        };
        // The state belongs to the newest snapshot only. Layers are combined below.
        let state = newest.state()?;
        let length = state.metadata().map_err(failed(newest.path()))?.len();
        copy(&state, &draft.state, 0, length).map_err(failed(draft.path()))?;

        let bytes = manifest.memory.bytes;
        let layers = lineage
            .memory()?
            .split_off(oldest.saturating_sub(memory_start));
        let is_memory_based = is_based && memory_start < oldest;
        let memory = combine(&layers, is_memory_based, &draft.memory, MEMORY_CHUNK, bytes)
            .map_err(failed(newest.path()))?;
        write_index(&draft.memory_index, &memory).map_err(failed(draft.path()))?;
        manifest.memory.stored = memory.stored.count();
        manifest.memory.zero = memory.zero.count();
        manifest.memory.complete = is_based && !is_memory_based;
        for (number, disk) in manifest.disks.iter_mut().enumerate() {
            let path = draft.path().join(disk_layer(number));
            let file = File::create_new(&path).map_err(SnapshotError::io(&path))?;
            let layers = lineage.disk(number)?.split_off(oldest);
            let merged = combine(&layers, is_based, &file, DISK_BLOCK, disk.bytes)
                .map_err(failed(newest.path()))?;
            write_index(&draft.disk_indexes[number], &merged).map_err(failed(draft.path()))?;
            disk.stored = merged.stored.count();
        }
        manifest.parent = below.map(|snapshot| snapshot.id().to_owned());
        lineage.copy_working_set(draft.path());
        replace(draft, &manifest, newest.path())?;
        // Update the index only after the files were replaced.
        self.index.insert(id, manifest.parent.as_deref());
        self.get(id)
    }
}

/// Replaces the snapshot at `place` by the draft atomically.
fn replace(draft: SnapshotDraft, manifest: &Manifest, place: &Path) -> Result<(), SnapshotError> {
    let path = draft.path().join(MANIFEST);
    let text = serde_json::to_vec_pretty(manifest).map_err(|e| SnapshotError::damaged(&path, e))?;
    fs::write(&path, text).map_err(SnapshotError::io(&path))?;
    // Sync before the exchange: it replaces a snapshot that may be on storage for a long time.
    sync_dir(draft.path()).map_err(SnapshotError::io(draft.path()))?;
    renameat2(
        AT_FDCWD,
        draft.path(),
        AT_FDCWD,
        place,
        RenameFlags::RENAME_EXCHANGE,
    )
    .map_err(|e| SnapshotError::io(place)(e.into()))
    // The draft's path now refers to the old files, which are removed when the draft is dropped.
}

/// Combines `layers` (oldest first, each of `bytes` bytes) into `to`. `is_based` states whether
/// `to` has layers below it.
fn combine(
    layers: &[SnapshotLayer],
    is_based: bool,
    to: &File,
    unit: u32,
    bytes: u64,
) -> io::Result<LayerIndex> {
    let indexes: Vec<LayerIndex> = layers
        .iter()
        .map(|layer| read_index(&layer.index))
        .collect::<io::Result<_>>()?;
    let mut merged = LayerIndex::empty(unit, bytes);
    // The file stays sparse: only stored units are written.
    to.set_len(bytes)?;
    // Copy runs of units from the same layer together: (index of the layer, first unit, end).
    let mut run: Option<(usize, u64, u64)> = None;
    // Writes the pending run of units.
    let flush = |run: Option<(usize, u64, u64)>| match run {
        Some((layer, first, end)) => {
            let start = first * u64::from(unit);
            copy(
                &layers[layer].file,
                to,
                start,
                bytes.min(end * u64::from(unit)),
            )
        }
        None => Ok(()),
    };
    for number in decided(&indexes, merged.units()).iter() {
        // The newest layer that decides the unit determines its content.
        let top = (0..indexes.len())
            .rev()
            .find(|&at| indexes[at].decides(number));
        let Some(layer) = top.filter(|&at| indexes[at].stored.contains(number)) else {
            // Without layers below, a hole represents a zero unit.
            if is_based && top.is_some() {
                merged.zero.insert(number);
            }
            continue;
        };
        merged.stored.insert(number);
        run = match run {
            Some((from, first, end)) if from == layer && end == number => {
                Some((from, first, number + 1))
            }
            other => {
                flush(other)?;
                Some((layer, number, number + 1))
            }
        };
    }
    flush(run)?;
    Ok(merged)
}

/// Returns the units that any of `indexes` stores or marks as zero. Skips empty words, because a
/// layer decides only few units of a large disk.
fn decided(indexes: &[LayerIndex], units: u64) -> UnitSet {
    let mut all = UnitSet::empty(units);
    for index in indexes {
        for set in [&index.stored, &index.zero] {
            for (at, &word) in set
                .words()
                .iter()
                .enumerate()
                .filter(|(_, word)| **word != 0)
            {
                all.insert_word(at, word);
            }
        }
    }
    all
}

/// Copies bytes `start..end` to the same offsets.
fn copy(from: &File, to: &File, start: u64, end: u64) -> io::Result<()> {
    let mut buffer = Vec::new();
    let mut at = start;
    while at < end {
        let stop = end.min(at - at % COPY_BYTES + COPY_BYTES);
        buffer.resize(usize::try_from(stop - at).map_err(io::Error::other)?, 0);
        from.read_exact_at(&mut buffer, at)?;
        to.write_all_at(&buffer, at)?;
        at = stop;
    }
    Ok(())
}

fn write_index(file: &File, index: &LayerIndex) -> io::Result<()> {
    index.write(file)
}
