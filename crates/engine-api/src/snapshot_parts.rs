//! Parts of a snapshot of this host, which an engine exports for other hosts.

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
    /// Ranges of indexes of the chunks that only the ancestors contain, in ascending order and not
    /// adjacent.
    pub inherited: Vec<Range<u64>>,
}

/// Kind of a snapshot's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotFileKind {
    /// Layer of guest memory.
    Memory,
    /// Layer of the writable disk with this index.
    Disk(u32),
    /// State of vCPUs and devices.
    DeviceState,
    /// Another file.
    Other,
}
