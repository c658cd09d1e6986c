//! Snapshots. A snapshot is *captured* when its memory is frozen in a process that outlives the
//! daemon. The process then writes the files.

use crate::parts::Moment;
use crate::size::SandboxSize;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum length of a snapshot's name in characters.
pub const MAX_SNAPSHOT_NAME: usize = 128;

fn name_pattern() -> String {
    format!(
        "^[A-Za-z0-9][A-Za-z0-9._:/-]{{0,{}}}$",
        MAX_SNAPSHOT_NAME - 1
    )
}

/// Body of a request to take a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SnapshotSandbox {
    /// Name of the snapshot. A name that has the form of an id is rejected.
    #[schemars(regex(pattern = name_pattern()))]
    pub name: Option<String>,
    /// False to store the disk only: sandboxes boot from the snapshot. Defaults to true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
    /// Wait until the store has the snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub durable: Option<bool>,
    /// Time at which the request is answered. Defaults to the default of the key, then to the
    /// daemon's (`stored`, unless `jiffy serve --snapshot-ack captured`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ack: Option<SnapshotAck>,
}

/// Time at which a request for a snapshot is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotAck {
    /// When the memory is frozen in a process that outlives the daemon.
    Captured,
    /// When the files are complete on the host.
    Stored,
}

/// Content of a snapshot or a pause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "PauseMode")]
pub enum SnapshotContent {
    /// Memory and disk.
    #[default]
    Full,
    /// Disk only. The sandbox boots from the disk, and runs the start command of its template.
    Filesystem,
}

impl SnapshotContent {
    /// Returns the content of a request with this field `memory`.
    pub fn with_memory(memory: Option<bool>) -> Self {
        match memory {
            Some(false) => Self::Filesystem,
            _ => Self::Full,
        }
    }

    /// Returns whether the content includes the memory.
    pub fn is_full(&self) -> bool {
        *self == Self::Full
    }
}

/// Purpose of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotPurpose {
    /// Snapshot of a booted template. Creates start from it.
    Template,
    /// Requested by a caller. It remains until it is removed.
    #[serde(rename = "asked")]
    Requested,
    /// Taken for a fork. Removed when no sandbox or snapshot descends from it.
    Fork,
    /// Taken for a pause. Removed when no sandbox or snapshot descends from it.
    Pause,
    /// Step of a build. Later builds reuse it.
    Step,
}

/// State of a snapshot in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StoreState {
    /// Only on this host.
    Local,
    /// On this host. The upload to the store is in progress.
    Uploading,
    /// In the store. Other hosts can use it.
    Stored,
}

impl StoreState {
    /// All states.
    pub const ALL: [Self; 3] = [Self::Local, Self::Uploading, Self::Stored];

    /// Name of the state.
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Uploading => "uploading",
            Self::Stored => "stored",
        }
    }
}

/// Completeness of a snapshot on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotStatus {
    /// Captured in memory and not yet complete on disk.
    Storing,
    /// Complete on disk.
    Ready,
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// Id of the snapshot.
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
    /// Name of the snapshot, or an empty list.
    pub names: Vec<String>,
    /// Completeness on this host.
    pub status: SnapshotStatus,
    /// Sandbox of which the snapshot was taken. Absent for a booted template.
    #[serde(rename = "originSandboxID", skip_serializing_if = "Option::is_none")]
    pub origin_sandbox_id: Option<String>,
    /// Template that the snapshot descends from.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Parent. The snapshot stores only the difference from its parent.
    #[serde(rename = "parentSnapshotID", skip_serializing_if = "Option::is_none")]
    pub parent_snapshot_id: Option<String>,
    /// Purpose of the snapshot.
    pub purpose: SnapshotPurpose,
    /// Virtual CPUs of sandboxes created from it.
    pub cpu_count: u8,
    /// Memory in MiB of sandboxes created from it.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Writable disk in MiB of sandboxes created from it.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Time at which the snapshot was taken.
    pub created_at: Moment,
    /// Equal to `createdAt`: snapshots do not change.
    pub updated_at: Moment,
    /// Time for which the guest was stopped, in milliseconds.
    #[schemars(range(min = 0.0))]
    pub stopped_ms: f64,
    /// Time from the request to completion in milliseconds. 0 until the snapshot is complete.
    #[schemars(range(min = 0.0))]
    pub total_ms: f64,
    /// State in the store. Absent without a store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_state: Option<StoreState>,
    /// All details.
    pub jiffy: SnapshotInfo,
}

/// Details of a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotInfo {
    /// Id of the snapshot: letters and digits.
    pub id: String,
    /// Name chosen by the creator.
    pub name: Option<String>,
    /// Purpose of the snapshot.
    pub purpose: SnapshotPurpose,
    /// Sandbox of which the snapshot was taken. Empty for a booted template.
    pub sandbox: String,
    /// API key of the sandbox; null if the host's owner created it.
    pub owner: Option<String>,
    /// Environment variables of the sandbox, the default of sandboxes created from the snapshot.
    /// Only the host's owner receives them.
    pub env: BTreeMap<String, String>,
    /// Template that the snapshot descends from.
    pub template: String,
    /// Fingerprint of the dependencies other than the parents.
    pub fingerprint: String,
    /// Size of sandboxes created from it.
    #[serde(flatten)]
    pub size: SandboxSize,
    /// Engine that took the snapshot and restores it.
    pub engine: String,
    /// Parent. The snapshot stores only the difference from its parent.
    pub parent: Option<String>,
    /// True if the snapshot remains even if no sandbox or snapshot descends from it.
    pub kept: bool,
    /// Time for which the guest was stopped, in milliseconds.
    #[schemars(range(min = 0.0))]
    pub stopped_ms: f64,
    /// Time from the request to completion in milliseconds. 0 until the snapshot is complete.
    #[schemars(range(min = 0.0))]
    pub total_ms: f64,
    /// Disk space of the snapshot in bytes, without its ancestors.
    pub bytes: u64,
    /// Time at which the snapshot was taken, in milliseconds since 1970.
    pub created_ms: u64,
    /// Content. Defaults to `full`.
    #[serde(default, skip_serializing_if = "SnapshotContent::is_full")]
    pub content: SnapshotContent,
    /// True if the snapshot is captured in memory and not yet complete on disk. Defaults to false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub storing: bool,
}

impl SnapshotInfo {
    /// Returns whether a caller requested the snapshot. Such snapshots appear in lists and count
    /// towards the owner's budget.
    pub fn is_requested(&self) -> bool {
        self.purpose == SnapshotPurpose::Requested && self.kept
    }
}

/// Result of comparing a snapshot with its checksums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifiedSnapshot {
    /// Id of the snapshot.
    pub id: String,
    /// True if the snapshot has checksums. Without checksums damage cannot be detected.
    #[serde(rename = "sealed")]
    pub has_checksums: bool,
    /// Chunks and files that differ.
    pub damaged: Vec<DamagedChunk>,
    /// True if the snapshot was damaged and has been fetched again from the store. Defaults to
    /// false.
    #[serde(rename = "mended", default, skip_serializing_if = "std::ops::Not::not")]
    pub repaired: bool,
}

/// Chunk or file of a snapshot that differs from its checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DamagedChunk {
    /// File of the snapshot.
    pub file: String,
    /// Number of the damaged 64 KiB chunk; null if the whole file is damaged.
    pub chunk: Option<u64>,
}
