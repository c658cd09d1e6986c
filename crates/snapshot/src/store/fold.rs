//! Folding: merges a snapshot's parent into the snapshot, which releases superseded data.
//!
//! A *draft* is the directory of a snapshot that is not published yet. A *unit* is the smallest
//! part that a layer stores: a chunk of 64 KiB of memory, or a block of 4 KiB of a disk.
//!
//! The files of a removed snapshot must remain while a child needs them. Without folds, a sandbox
//! that takes a snapshot at each step and removes the previous one would therefore retain every
//! version of its memory and disk. A fold copies the units that only the lower snapshot stores into
//! the layer files of the upper snapshot, at offsets that the upper index does not claim. It then
//! replaces the indexes and the manifest of the upper snapshot atomically. The lower snapshot can
//! be removed afterwards.
//!
//! - A reader with the old indexes reads the same content as before, because no claimed offset is
//!   written. Guests, restores and uploads therefore continue during a fold.
//! - If the process is killed or the host loses power at any time, either the old or the new
//!   snapshot remains. Bytes copied before the commit are at unclaimed offsets, and the next fold
//!   writes them again.
//! - The copy is at most as large as the content of the upper snapshot, or as the caller's limit.
//!   With a small limit, content that is never superseded is copied a logarithmic number of times.
//!   A chain of folded snapshots then takes at most twice the space of its content.

use crate::checked_snapshots::FileStamp;
use crate::checksums::CHECKSUMS_FILE;
use crate::draft::{remove_draft, sync_dir};
use crate::manifest::Manifest;
use crate::snapshot::working_set::SET_FILES;
use crate::snapshot::{
    MANIFEST, MEMORY_INDEX, MEMORY_LAYER, Snapshot, disk_index, disk_layer, read_index,
};
use crate::{SnapshotError, SnapshotLayer, Store};
use jiffy_proto::layer::{DISK_BLOCK, LayerIndex, MEMORY_CHUNK, UnitSet};
use jiffy_proto::snapshot::{FileIdentity, FoldedLayers, SnapshotLayerFiles};
use nix::fcntl::{AT_FDCWD, FallocateFlags, RenameFlags, fallocate, renameat2};
use std::fs::{self, File};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Number of bytes copied between two calls of the caller's pace function. Each piece ends at a
/// multiple of this size, so that the page cache contains whole huge pages, which can be mapped
/// into guests.
const PIECE_BYTES: u64 = 2 << 20;
/// Granularity of holes in bytes: a block of this size is punched out if it contains only zeroes.
const HOLE_BYTES: usize = MEMORY_CHUNK as usize;

/// Called after each copied piece with its length in bytes, to limit the rate of copying. `Break`
/// cancels the fold.
pub type FoldPace<'a> = dyn FnMut(u64) -> ControlFlow<()> + 'a;

/// Prepared fold of a snapshot's parent into the snapshot. If it is dropped before
/// [`Self::commit`], both snapshots remain unchanged.
#[derive(Debug)]
pub struct Fold {
    store: Store,
    /// Snapshot into which the parent is folded.
    id: String,
    /// Snapshot that is folded.
    parent: String,
    /// Parent of the folded snapshot. `None` if it has no parent.
    grandparent: Option<String>,
    draft: FoldDraft,
    /// Stamps of the manifests of the snapshot and its parent at the time of preparation.
    stamps: [FileStamp; 2],
    files: FoldedLayers,
}

/// Directory with the files of the folded snapshot. Its layer files are hard links to the layer
/// files of the snapshot.
#[derive(Debug)]
struct FoldDraft {
    path: PathBuf,
    /// Copied units. They are removed from the layers if the fold is not committed.
    copied: Vec<(File, UnitSet, u32)>,
    /// True after the commit. Otherwise dropping this value removes the draft.
    is_committed: bool,
}

impl Drop for FoldDraft {
    fn drop(&mut self) {
        if !self.is_committed {
            for (file, units, unit) in &self.copied {
                // Ignore the error: the bytes are unclaimed, and occupy space until the next fold.
                let _ = each_run(units, *unit, |start, end| punch(file, start, end));
            }
        }
        // After the commit, the path refers to the replaced files.
        remove_draft(&self.path);
    }
}

/// Fold of one layer.
struct LayerFold {
    /// File names of the layer and of its index.
    names: [String; 2],
    upper: SnapshotLayer,
    lower: SnapshotLayer,
    /// Units to copy from the lower file into the upper one.
    copied: UnitSet,
    /// Index of the upper layer after the fold.
    index: LayerIndex,
    /// Number of bytes that the upper layer stores before the fold.
    upper_bytes: u64,
}

impl LayerFold {
    /// Compares two layers. If `is_complete`, the upper layer does not depend on the lower one.
    fn new(
        names: [String; 2],
        [lower, upper]: [SnapshotLayer; 2],
        is_complete: bool,
        path: &Path,
    ) -> Result<Self, SnapshotError> {
        let read = |layer: &SnapshotLayer| {
            read_index(&layer.index).map_err(|e| SnapshotError::damaged(path, e))
        };
        let (below, mut index) = (read(&lower)?, read(&upper)?);
        if (below.unit, below.units()) != (index.unit, index.units()) {
            return Err(SnapshotError::damaged(path, "its layers differ in size"));
        }
        let upper_bytes = index.stored.count() * u64::from(index.unit);
        // Units that the upper layer stores or marks as zero. The parent's content of them is
        // superseded.
        let decided = if is_complete {
            UnitSet::full(index.units())
        } else {
            index.stored.with(&index.zero)
        };
        let copied = below.stored.without(&decided);
        index.stored = index.stored.with(&copied);
        index.zero = index.zero.with(&below.zero.without(&decided));
        Ok(Self {
            names,
            upper,
            lower,
            copied,
            index,
            upper_bytes,
        })
    }

    fn copied_bytes(&self) -> u64 {
        self.copied.count() * u64::from(self.index.unit)
    }
}

impl Store {
    /// Prepares the fold of the parent of snapshot `id` into `id` by copying the units that only
    /// the parent stores. Returns `None` if `id` has no parent, if the parent has other children,
    /// or if `pace` cancels the fold. Also returns `None` if the copy would be larger than both
    /// `max_copy` bytes and the content of `id`.
    ///
    /// The caller must prevent other folds, merges and imports of both snapshots until the fold is
    /// committed or dropped.
    pub fn prepare_fold(
        &self,
        id: &str,
        max_copy: u64,
        pace: &mut FoldPace<'_>,
    ) -> Result<Option<Fold>, SnapshotError> {
        let stamp = |id: &str| FileStamp::of(&self.root().join(id).join(MANIFEST));
        // Take each stamp before the snapshot is read. `commit` then detects any later change.
        let upper_stamp = stamp(id)?;
        let upper = self.get(id)?;
        let Some(parent) = upper.manifest().parent.clone() else {
            return Ok(None);
        };
        let lower_stamp = stamp(&parent)?;
        let lower = self.get(&parent)?;
        if !self.is_only_child(&parent, id)? || !have_equal_sizes(&lower, &upper) {
            return Ok(None);
        }
        // A layer with missing chunks cannot be copied.
        upper.check_complete()?;
        if !upper.manifest().memory.complete {
            lower.check_complete()?;
        }
        let layers = open_layers(&lower, &upper)?;
        let copied: u64 = layers.iter().map(LayerFold::copied_bytes).sum();
        let upper_bytes: u64 = layers.iter().map(|layer| layer.upper_bytes).sum();
        if copied > upper_bytes.max(max_copy) {
            return Ok(None);
        }
        let files = identities(&layers).map_err(SnapshotError::io(upper.path()))?;
        let grandparent = lower.manifest().parent.clone();
        let manifest = folded_manifest(&lower, &upper, &layers);
        let draft = FoldDraft {
            path: self.new_draft_path(),
            copied: Vec::new(),
            is_committed: false,
        };
        let mut fold = Fold {
            store: self.clone(),
            id: id.to_owned(),
            parent,
            grandparent,
            draft,
            stamps: [upper_stamp, lower_stamp],
            files,
        };
        let prepared = fold.fill(&upper, &manifest, layers, pace)?;
        // A cancelled fold is dropped here, which undoes the copy.
        Ok(prepared.is_continue().then_some(fold))
    }

    fn is_only_child(&self, parent: &str, id: &str) -> Result<bool, SnapshotError> {
        let mut index = self.index.loaded()?;
        let is_only = index
            .tree()
            .is_some_and(|tree| tree.is_only_child(parent, id));
        Ok(is_only)
    }
}

/// Returns whether memory and disks of both snapshots have the same sizes.
fn have_equal_sizes(lower: &Snapshot, upper: &Snapshot) -> bool {
    let sizes = |snapshot: &Snapshot| {
        let manifest = snapshot.manifest();
        let disks: Vec<u64> = manifest.disks.iter().map(|disk| disk.bytes).collect();
        (manifest.memory.bytes, disks)
    };
    sizes(lower) == sizes(upper)
}

/// Opens all layers of both snapshots, memory first.
fn open_layers(lower: &Snapshot, upper: &Snapshot) -> Result<Vec<LayerFold>, SnapshotError> {
    let memory = [lower.memory()?, upper.memory()?];
    let names = [MEMORY_LAYER, MEMORY_INDEX].map(str::to_owned);
    let is_complete = upper.manifest().memory.complete;
    let mut layers = vec![LayerFold::new(names, memory, is_complete, upper.path())?];
    for number in 0..upper.manifest().disks.len() {
        let disk = [lower.disk(number)?, upper.disk(number)?];
        let names = [disk_layer(number), disk_index(number)];
        layers.push(LayerFold::new(names, disk, false, upper.path())?);
    }
    Ok(layers)
}

/// Returns the identities of the layer files, by which a VMM finds its open layers.
fn identities(layers: &[LayerFold]) -> io::Result<FoldedLayers> {
    let files = |layer: fn(&LayerFold) -> &File| -> io::Result<SnapshotLayerFiles> {
        let all = layers.iter().map(|fold| {
            let metadata = layer(fold).metadata()?;
            Ok(FileIdentity {
                device: metadata.dev(),
                inode: metadata.ino(),
            })
        });
        let mut all = all.collect::<io::Result<Vec<FileIdentity>>>()?.into_iter();
        let memory = all.next().ok_or(io::ErrorKind::NotFound)?;
        Ok(SnapshotLayerFiles {
            memory,
            disks: all.collect(),
        })
    };
    Ok(FoldedLayers {
        lower: files(|layer| &layer.lower.file)?,
        upper: files(|layer| &layer.upper.file)?,
    })
}

/// Returns the manifest of the result: the upper snapshot's, with the parent of the lower one.
fn folded_manifest(lower: &Snapshot, upper: &Snapshot, layers: &[LayerFold]) -> Manifest {
    let mut manifest = upper.manifest().clone();
    manifest.parent = lower.manifest().parent.clone();
    // `complete` is only set for a snapshot with a parent: without one, the memory cannot depend on
    // other layers.
    let is_complete = manifest.memory.complete || lower.manifest().memory.complete;
    manifest.memory.complete = is_complete && manifest.parent.is_some();
    if let Some((memory, disks)) = layers.split_first() {
        manifest.memory.stored = memory.index.stored.count();
        manifest.memory.zero = memory.index.zero.count();
        for (sizes, disk) in manifest.disks.iter_mut().zip(disks) {
            debug_assert_eq!(disk.index.unit, DISK_BLOCK);
            sizes.stored = disk.index.stored.count();
        }
    }
    manifest
}

impl Fold {
    /// Returns the id of the snapshot that is folded into its child. This parent is not needed
    /// after the commit.
    pub fn parent(&self) -> &str {
        &self.parent
    }

    /// Creates the files of the draft and copies the units that the upper layers lack.
    fn fill(
        &mut self,
        upper: &Snapshot,
        manifest: &Manifest,
        layers: Vec<LayerFold>,
        pace: &mut FoldPace<'_>,
    ) -> Result<ControlFlow<()>, SnapshotError> {
        let lower = self.store.root().join(&self.parent);
        let draft = self.draft.path.clone();
        fs::create_dir(&draft).map_err(SnapshotError::io(&draft))?;
        let indexes: Vec<&String> = layers.iter().map(|layer| &layer.names[1]).collect();
        // The checksums belong to the old indexes.
        let is_replaced = |name: &str| {
            [MANIFEST, CHECKSUMS_FILE].contains(&name) || indexes.iter().any(|index| *index == name)
        };
        link_files(upper.path(), &draft, is_replaced)?;
        // If the memory is complete, it does not depend on the parent's memory. The recorded sets
        // of the parent then do not apply to it.
        let sets: &[_] = if upper.manifest().memory.complete {
            &[]
        } else {
            &SET_FILES
        };
        for (name, _) in sets {
            // Add the recorded sets that only the parent has. Ignore the error: an existing set of
            // the snapshot is newer. Without a set, restores are only slower.
            let _ = fs::hard_link(lower.join(name), draft.join(name));
        }
        let path = draft.join(MANIFEST);
        let text =
            serde_json::to_vec_pretty(manifest).map_err(|e| SnapshotError::damaged(&path, e))?;
        fs::write(&path, text).map_err(SnapshotError::io(&path))?;
        for layer in layers {
            let path = draft.join(&layer.names[1]);
            let index = File::create_new(&path).map_err(SnapshotError::io(&path))?;
            layer
                .index
                .write(&index)
                .map_err(SnapshotError::io(&path))?;
            let path = draft.join(&layer.names[0]);
            let failed = SnapshotError::io(&path);
            let file = File::options().write(true).open(&path).map_err(failed)?;
            let to = file.try_clone().map_err(SnapshotError::io(&path))?;
            let unit = layer.index.unit;
            // Record the units before the copy, so that an incomplete copy is undone as well.
            self.draft.copied.push((file, layer.copied.clone(), unit));
            // Length of the layer file. The last unit of a disk may be shorter than the others.
            let length = layer
                .lower
                .file
                .metadata()
                .map_err(SnapshotError::io(upper.path()))?
                .len();
            let mut cancelled = ControlFlow::Continue(());
            each_run(&layer.copied, unit, |start, end| {
                // `each_run` has no way to stop: skip the remaining runs.
                if cancelled.is_continue() {
                    cancelled = copy(&layer.lower.file, &to, start, end.min(length), pace)?;
                }
                Ok(())
            })
            .map_err(SnapshotError::io(&path))?;
            if cancelled.is_break() {
                return Ok(cancelled);
            }
        }
        // Sync before the exchange: it replaces a snapshot that may be on storage for a long time.
        sync_dir(&draft).map_err(SnapshotError::io(&draft))?;
        Ok(ControlFlow::Continue(()))
    }

    /// Replaces the snapshot by the folded snapshot atomically. The parent is no longer needed, and
    /// new checksums must be written. Returns the identities of the merged files.
    pub fn commit(mut self) -> Result<FoldedLayers, SnapshotError> {
        let place = self.store.root().join(&self.id);
        let parent = self.store.root().join(&self.parent);
        for (path, before) in [&place, &parent].into_iter().zip(self.stamps) {
            if FileStamp::of(&path.join(MANIFEST))? != before {
                return Err(SnapshotError::Lineage {
                    id: self.id.clone(),
                    problem: "was changed while its parent was folded into it".to_owned(),
                });
            }
        }
        let path = &self.draft.path;
        // The directories are exchanged, so one of them is at the path at any time.
        renameat2(
            AT_FDCWD,
            path,
            AT_FDCWD,
            &place,
            RenameFlags::RENAME_EXCHANGE,
        )
        .map_err(|e| SnapshotError::io(&place)(e.into()))?;
        self.draft.is_committed = true;
        let index = &self.store.index;
        // Update the index only after the exchange, which may fail.
        index.fold(&self.id, &self.parent, self.grandparent.as_deref());
        index.checked.remove(&self.id);
        Ok(self.files.clone())
    }
}

/// Links the files of `from` into `to`, except for replaced files.
fn link_files(
    from: &Path,
    to: &Path,
    is_replaced: impl Fn(&str) -> bool,
) -> Result<(), SnapshotError> {
    let failed = SnapshotError::io(from);
    for entry in fs::read_dir(from).map_err(failed)? {
        let name = entry.map_err(SnapshotError::io(from))?.file_name();
        if name.to_str().is_some_and(&is_replaced) {
            continue;
        }
        let path = to.join(&name);
        fs::hard_link(from.join(&name), &path).map_err(SnapshotError::io(&path))?;
    }
    Ok(())
}

/// Calls `work` with the start and end offset of each run of `units`. `unit` is the size of a unit
/// in bytes.
fn each_run(
    units: &UnitSet,
    unit: u32,
    mut work: impl FnMut(u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    let unit = u64::from(unit);
    let mut run: Option<(u64, u64)> = None;
    for number in units.iter() {
        match &mut run {
            Some((_, end)) if *end == number => *end += 1,
            _ => {
                if let Some((start, end)) = run.replace((number, number + 1)) {
                    work(start * unit, end * unit)?;
                }
            }
        }
    }
    run.map_or(Ok(()), |(start, end)| work(start * unit, end * unit))
}

/// Copies bytes `start..end` to the same offsets. Zeroes become holes.
fn copy(
    from: &File,
    to: &File,
    start: u64,
    end: u64,
    pace: &mut FoldPace<'_>,
) -> io::Result<ControlFlow<()>> {
    let mut buffer = Vec::new();
    let mut at = start;
    while at < end {
        // The next multiple of the piece size.
        let stop = end.min(at - at % PIECE_BYTES + PIECE_BYTES);
        buffer.resize(usize::try_from(stop - at).map_err(io::Error::other)?, 0);
        from.read_exact_at(&mut buffer, at)?;
        let is_zero = |part: &[u8]| part.iter().all(|byte| *byte == 0);
        // Without zero blocks, one call writes the whole piece.
        if buffer.chunks(HOLE_BYTES).any(is_zero) {
            let mut offset = at;
            for part in buffer.chunks(HOLE_BYTES) {
                let next = offset + part.len() as u64;
                // The destination may contain bytes of an interrupted fold, so skipping zeroes is
                // not sufficient.
                if is_zero(part) {
                    punch(to, offset, next)?
                } else {
                    to.write_all_at(part, offset)?
                }
                offset = next;
            }
        } else {
            to.write_all_at(&buffer, at)?;
        }
        if pace(stop - at).is_break() {
            return Ok(ControlFlow::Break(()));
        }
        at = stop;
    }
    Ok(ControlFlow::Continue(()))
}

/// Replaces the bytes from `start` to `end` by a hole, which releases their disk space.
fn punch(file: &File, start: u64, end: u64) -> io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let signed = |n| i64::try_from(n).map_err(io::Error::other);
    Ok(fallocate(
        file,
        flags,
        signed(start)?,
        signed(end - start)?,
    )?)
}
