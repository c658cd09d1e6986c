//! Files of a snapshot for transfer to other hosts. Each layer lists the chunks that it inherits
//! from its ancestors.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *unit* is the smallest part that a layer stores: a chunk of 64 KiB of
//! memory, or a block of 4 KiB of a disk. A layer *decides* a unit that it stores or marks as zero.

use crate::manifest::Manifest;
use crate::snapshot::missing::MISSING_FILE;
use crate::snapshot::working_set::SET_FILES;
use crate::snapshot::{
    MANIFEST, MAX_MANIFEST_BYTES, MEMORY_INDEX, MEMORY_LAYER, STATE, disk_index, disk_layer,
    read_index,
};
use crate::snapshot_dir::SnapshotDir;
use crate::{SnapshotError, Store};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, UnitSet};
use std::fs::File;
use std::ops::Range;

/// File of a snapshot.
#[derive(Debug)]
pub struct SnapshotPart {
    /// File name.
    pub name: String,
    /// Open file, readable.
    pub file: File,
    /// Kind.
    pub kind: PartKind,
    /// Ranges of 64 KiB chunks that lower layers provide, in ascending order and not adjacent.
    pub inherited: Vec<Range<u64>>,
}

/// Kind of a snapshot's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartKind {
    /// Memory layer.
    Memory,
    /// Layer of the writable disk with this index.
    Disk(u32),
    /// State of vCPUs and devices.
    State,
    /// Index or manifest.
    Other,
}

impl Store {
    /// Opens all files of snapshot `id` except its checksums, which each host computes itself. The
    /// manifest belongs to the opened files even if a merge replaces the snapshot concurrently.
    pub fn parts(&self, id: &str) -> Result<(Manifest, Vec<SnapshotPart>), SnapshotError> {
        crate::manifest::check_id(id)?;
        let path = self.root().join(id);
        if !path.exists() {
            return Err(SnapshotError::Missing(id.to_owned()));
        }
        // All files are opened relative to this directory, so a merge does not mix old and new
        // files.
        let dir = SnapshotDir::at(&path)?;
        // Check this file first. A complete snapshot never becomes incomplete, so the files opened
        // later are complete.
        if dir.find(MISSING_FILE)?.is_some() {
            return Err(SnapshotError::Incomplete(id.to_owned()));
        }
        let text = dir.read(MANIFEST, MAX_MANIFEST_BYTES)?;
        let manifest = Manifest::parse(&text, id, &dir.path(MANIFEST))?;
        let based = manifest.parent.is_some();
        let mut parts = vec![part(&dir, MANIFEST)?, part(&dir, STATE)?];
        parts[1].kind = PartKind::State;
        parts.extend(layer(
            &dir,
            MEMORY_LAYER,
            MEMORY_INDEX,
            PartKind::Memory,
            based && !manifest.memory.complete,
        )?);
        // `number` and `disk` are the same index, as `u32` and `usize`.
        for (number, disk) in (0..).zip(0..manifest.disks.len()) {
            let (file, index) = (disk_layer(disk), disk_index(disk));
            parts.extend(layer(&dir, &file, &index, PartKind::Disk(number), based)?);
        }
        for (name, _) in SET_FILES {
            if let Some(file) = dir.find(name)? {
                parts.push(plain(name, file));
            }
        }
        Ok((manifest, parts))
    }
}

fn part(dir: &SnapshotDir<'_>, name: &str) -> Result<SnapshotPart, SnapshotError> {
    Ok(plain(name, dir.open(name)?))
}

fn plain(name: &str, file: File) -> SnapshotPart {
    SnapshotPart {
        name: name.to_owned(),
        file,
        kind: PartKind::Other,
        inherited: Vec::new(),
    }
}

/// Opens a layer and its index. `based` states whether the layer has ancestors.
fn layer(
    dir: &SnapshotDir<'_>,
    name: &str,
    index: &str,
    kind: PartKind,
    based: bool,
) -> Result<[SnapshotPart; 2], SnapshotError> {
    let (mut layer, index) = (part(dir, name)?, part(dir, index)?);
    layer.kind = kind;
    // A layer without a parent inherits nothing: units that it does not store are zero.
    if based {
        let decided = read_index(&index.file)
            .map_err(|e| SnapshotError::damaged(&dir.path(&index.name), e))?;
        layer.inherited = inherited(&decided);
    }
    Ok([layer, index])
}

/// Returns the ranges of chunks in which the layer neither stores nor zeroes any unit.
fn inherited(index: &LayerIndex) -> Vec<Range<u64>> {
    // Disk layers have several units per chunk, memory layers one.
    let per_chunk = u64::from((MEMORY_CHUNK / index.unit.max(1)).max(1));
    let mut decided = UnitSet::empty(index.units().div_ceil(per_chunk));
    for unit in index.stored.iter().chain(index.zero.iter()) {
        decided.insert(unit / per_chunk);
    }
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for chunk in (0..decided.units()).filter(|chunk| !decided.contains(*chunk)) {
        match ranges.last_mut() {
            Some(last) if last.end == chunk => last.end += 1,
            _ => ranges.push(chunk..chunk + 1),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_proto::layer::DISK_BLOCK;

    #[test]
    fn a_chunk_is_inherited_if_no_unit_of_it_is_decided() {
        let mut disk = LayerIndex::empty(DISK_BLOCK, 5 * u64::from(MEMORY_CHUNK) + 1);
        assert!(inherited(&disk).iter().eq([&(0..6)]));
        // A chunk has 16 blocks: blocks 17, 63 and 80 are in chunks 1, 3 and 5.
        disk.stored.insert(17);
        disk.zero.insert(63);
        assert_eq!(inherited(&disk), [0..1, 2..3, 4..6]);
        disk.stored.insert(80);
        assert_eq!(inherited(&disk), [0..1, 2..3, 4..5]);
        let mut memory = LayerIndex::empty(MEMORY_CHUNK, 4 * u64::from(MEMORY_CHUNK));
        memory.zero.insert(0);
        memory.stored.insert(3);
        assert!(inherited(&memory).iter().eq([&(1..3)]));
    }
}
