//! Actions and times of snapshots.

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
