//! Actions, times and results of snapshots.

use serde::{Deserialize, Serialize};

/// Action of a guest after its snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterSnapshot {
    /// Run on.
    Resume,
    /// End; its memory is free when the call returns.
    Stop,
}

/// Is told, once the memory of a snapshot is frozen in a process that survives this one, for how
/// many microseconds the guest was paused.
pub type CaptureNotice = tokio::sync::oneshot::Sender<u64>;

/// Durations of a completed snapshot in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotTimes {
    /// Time that the guest was paused.
    pub stopped_us: u64,
    /// From the request to the last byte written (to files, not to storage).
    pub total_us: u64,
}

/// Result of comparing a snapshot with its checksums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifiedSnapshot {
    /// Id of the snapshot.
    pub id: String,
    /// True if it has checksums; without them nothing is known.
    pub sealed: bool,
    /// Chunks and files that differ.
    pub damaged: Vec<DamagedChunk>,
    /// True if it was damaged and has been fetched anew from the store: it is as it was written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mended: bool,
}

/// Chunk or file of a snapshot that differs from its checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedChunk {
    /// File of the snapshot.
    pub file: String,
    /// Number of the 64 KiB chunk; none if the file is damaged as a whole.
    pub chunk: Option<u64>,
}
