//! Merging: a snapshot made independent of what lies below it.
//!
//! A sandbox that is snapshotted often has a long lineage, and every layer costs a restore. Merged, a snapshot holds all that
//! its layers together say, under the same name, and has no parent. What runs from the old files keeps them open and goes on:
//! both say the same.

use crate::draft::Draft;
use crate::manifest::Manifest;
use crate::snapshot::{MANIFEST, disk_layer, read_index};
use crate::{Layer, Snapshot, SnapshotError, Store};
use jiffy_proto::layer::{DISK_BLOCK, LayerIndex, MEMORY_CHUNK};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes copied in one go.
const PIECE: u64 = 1 << 20;

impl Store {
    /// Makes snapshot `id` independent of its ancestors; one that has none is left as it is. Killed in the middle, it leaves
    /// the old or the new snapshot.
    pub fn merge(&self, id: &str) -> Result<Snapshot, SnapshotError> {
        let lineage = self.lineage(id)?;
        let newest = self.get(id)?;
        if newest.manifest().parent.is_none() {
            return Ok(newest);
        }
        let mut manifest = newest.manifest().clone();
        let draft = self.draft(manifest.disks.len())?;
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |e| SnapshotError::io(&path)(e)
        };
        let state = newest.state()?;
        let length = state.metadata().map_err(failed(newest.path()))?.len();
        copy(&state, &draft.state, 0, length).map_err(failed(draft.path()))?;

        let layers = lineage.memory()?;
        let memory = combine(&layers, &draft.memory, MEMORY_CHUNK, manifest.memory.bytes)
            .map_err(failed(newest.path()))?;
        write_index(&draft.memory_index, &memory).map_err(failed(draft.path()))?;
        manifest.memory.stored = memory.stored.count();
        manifest.memory.zero = 0;
        for (number, disk) in manifest.disks.iter_mut().enumerate() {
            let path = draft.path().join(disk_layer(number));
            let file = File::create_new(&path).map_err(SnapshotError::io(&path))?;
            let layers = lineage.disk(number)?;
            let merged =
                combine(&layers, &file, DISK_BLOCK, disk.bytes).map_err(failed(newest.path()))?;
            write_index(&draft.disk_indexes[number], &merged).map_err(failed(draft.path()))?;
            disk.stored = merged.stored.count();
        }
        manifest.parent = None;
        replace(draft, &manifest, newest.path())?;
        self.family.insert(id, None);
        self.get(id)
    }
}

/// Puts the draft in the place of the snapshot at `place`, in one step.
fn replace(draft: Draft, manifest: &Manifest, place: &Path) -> Result<(), SnapshotError> {
    let path = draft.path().join(MANIFEST);
    let text = serde_json::to_vec_pretty(manifest).map_err(|e| SnapshotError::damaged(&path, e))?;
    fs::write(&path, text).map_err(SnapshotError::io(&path))?;
    renameat2(
        AT_FDCWD,
        draft.path(),
        AT_FDCWD,
        place,
        RenameFlags::RENAME_EXCHANGE,
    )
    .map_err(|e| SnapshotError::io(place)(e.into()))
    // The draft's name now belongs to the old files; they go with it.
}

/// Writes to `to` what `layers`, oldest first, together hold of `bytes` bytes. Nothing lies below the result.
fn combine(layers: &[Layer], to: &File, unit: u32, bytes: u64) -> io::Result<LayerIndex> {
    let indexes: Vec<LayerIndex> = layers
        .iter()
        .map(|layer| read_index(&layer.index))
        .collect::<io::Result<_>>()?;
    let mut merged = LayerIndex::empty(unit, bytes);
    to.set_len(bytes)?;
    // Runs of units from the same layer are copied together.
    let mut run: Option<(usize, u64, u64)> = None;
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
    for number in 0..merged.units() {
        let top = (0..indexes.len())
            .rev()
            .find(|&at| indexes[at].decides(number));
        // A unit that was made zero is a hole, and a hole reads as zero.
        let Some(layer) = top.filter(|&at| indexes[at].stored.contains(number)) else {
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

/// Copies bytes `start..end` to the same place.
fn copy(from: &File, to: &File, start: u64, end: u64) -> io::Result<()> {
    let mut buffer = Vec::new();
    let mut at = start;
    while at < end {
        let length = usize::try_from(PIECE.min(end - at)).map_err(io::Error::other)?;
        buffer.resize(length, 0);
        from.read_exact_at(&mut buffer, at)?;
        to.write_all_at(&buffer, at)?;
        at += PIECE;
    }
    Ok(())
}

fn write_index(file: &File, index: &LayerIndex) -> io::Result<()> {
    file.write_all_at(&index.encode(), 0)
}
