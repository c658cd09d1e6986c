//! [`SnapshotParts`]: the open files of a snapshot of this host. An engine returns them for the
//! upload to the store that hosts share.
//!
//! Memory and disks are stored as layers: a layer contains only chunks (pieces of 64 KiB) that
//! differ from the parent snapshot.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// Size in bytes of the chunks of [`SnapshotFile::inherited`] and [`SnapshotParts::working_set`].
pub const PART_CHUNK_BYTES: u64 = 64 << 10;

/// All files of a snapshot, open. They remain readable if the snapshot is removed or merged.
#[derive(Debug, Clone)]
pub struct SnapshotParts {
    /// Snapshot id.
    pub id: String,
    /// Snapshot on which the files are based.
    pub parent: Option<String>,
    /// Name of the engine that took the snapshot.
    pub engine: String,
    /// Template with its version.
    pub template: String,
    /// Version of Jiffy that took the snapshot.
    pub version: String,
    /// Release of the guest kernel, or version of gVisor.
    pub kernel: String,
    /// Version of the agent. Empty if unknown.
    pub agent: String,
    /// Required processor features. Empty if any processor suffices.
    pub processor: String,
    /// Files.
    pub files: Vec<SnapshotFile>,
    /// Indexes of the memory chunks that a restored guest touches first, in ascending order. Empty
    /// if unknown.
    pub working_set: Vec<u32>,
}

/// File of a snapshot. Holes contain zeroes.
#[derive(Debug, Clone)]
pub struct SnapshotFile {
    /// Name in the snapshot's directory.
    pub name: String,
    /// Kind.
    pub kind: SnapshotFileKind,
    /// Open file, which does not change.
    pub file: Arc<File>,
    /// Chunks of this layer that are equal in the parent, and are therefore stored by an ancestor
    /// only: ranges of indexes, in ascending order and not adjacent.
    pub inherited: Vec<Range<u64>>,
}

/// Kind of a snapshot's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotFileKind {
    /// Guest memory that differs from the parent.
    Memory,
    /// Blocks of the writable disk with this index that differ from the parent.
    Disk(u32),
    /// State of vCPUs and devices.
    DeviceState,
    /// Another file.
    Other,
}
