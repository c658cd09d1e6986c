//! Snapshot of this host, as its engine hands it out for other hosts.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of the chunks that [`SnapshotFile::inherited`] counts.
pub const PART_CHUNK_BYTES: u64 = 64 << 10;

/// All files of a snapshot, open: they stay readable if it is removed or merged meanwhile.
#[derive(Debug, Clone)]
pub struct SnapshotParts {
    /// Id.
    pub id: String,
    /// Snapshot that the files are based on.
    pub parent: Option<String>,
    /// Name of the engine that took it.
    pub engine: String,
    /// Template, and its version.
    pub template: String,
    /// Version of Jiffy that took it.
    pub version: String,
    /// Release of the guest kernel, or version of gVisor.
    pub kernel: String,
    /// Version of the agent; empty: unknown.
    pub agent: String,
    /// Features of the processor that it needs; empty: any.
    pub processor: String,
    /// Files.
    pub files: Vec<SnapshotFile>,
    /// Chunks of memory that a restored guest touches first, ascending; empty: unknown.
    pub working_set: Vec<u32>,
}

/// File of a snapshot. Its holes are zeroes.
#[derive(Debug, Clone)]
pub struct SnapshotFile {
    /// Name in the snapshot's directory.
    pub name: String,
    /// Kind.
    pub kind: SnapshotFileKind,
    /// The file, which does not change.
    pub file: Arc<File>,
    /// Ranges of chunks that the snapshots below it have, ascending and apart.
    pub inherited: Vec<Range<u64>>,
}

/// Kind of a snapshot's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotFileKind {
    /// Layer of guest memory.
    Memory,
    /// Layer of the writable disk of this number.
    Disk(u32),
    /// State of vCPUs and devices.
    DeviceState,
    /// Another file.
    Other,
}
