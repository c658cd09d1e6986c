//! Actions after snapshots, and durations of snapshots.

use serde::{Deserialize, Serialize};

/// Action of a guest after its snapshot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterSnapshot {
    /// The guest continues to run.
    Resume,
    /// The guest is terminated. Its memory is released when the call returns.
    Stop,
}

/// Notice that the memory of a snapshot is frozen in a process that survives this one. The value is
/// the time for which the guest was paused, in microseconds.
pub type CaptureNotice = tokio::sync::oneshot::Sender<u64>;

/// Durations of a completed snapshot in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotTimes {
    /// Time for which the guest was paused.
    pub stopped_us: u64,
    /// Time from the request until the last byte is written to the files; they may not be synced
    /// yet.
    pub total_us: u64,
}
