//! Request for a snapshot, the guest's action afterwards, and the durations that the engine
//! reports.
//!
//! A snapshot is *captured* when its memory is frozen in a process that survives this one. Its
//! files are written afterwards.

use jiffy_api_types::SnapshotContent;
use serde::{Deserialize, Serialize};

/// Action of a guest after its snapshot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterSnapshot {
    /// The guest continues to run.
    Resume,
    /// The guest is terminated. Its memory is released when the call returns.
    Stop,
}

/// Request for a snapshot.
#[derive(Debug)]
pub struct SnapshotRequest<'a> {
    /// Id of the new snapshot.
    pub id: &'a str,
    /// Latest snapshot of the guest.
    pub parent: Option<&'a str>,
    /// Content of the snapshot.
    pub content: SnapshotContent,
    /// Action of the guest after the snapshot.
    pub then: AfterSnapshot,
    /// Maximum size in bytes ([`SnapshotFiles::size`](crate::SnapshotFiles::size)). A larger
    /// snapshot is rejected ([`EngineError::SnapshotTooLarge`](crate::EngineError)).
    pub max_bytes: Option<u64>,
    /// Sent when the snapshot is captured: from then on, the snapshot is completed even if this
    /// process exits ([`DetachedGuest::captured`](crate::DetachedGuest::captured)). An engine that
    /// does not capture snapshots drops the notice.
    pub notice: Option<CaptureNotice>,
}

impl<'a> SnapshotRequest<'a> {
    /// Returns the request for a snapshot of memory and disk without a limit.
    pub fn new(id: &'a str, then: AfterSnapshot) -> Self {
        Self {
            id,
            parent: None,
            content: SnapshotContent::Full,
            then,
            max_bytes: None,
            notice: None,
        }
    }
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
