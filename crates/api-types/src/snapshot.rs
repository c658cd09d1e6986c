//! Snapshots.

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
    /// Name of the snapshot. A name in the form of an id is rejected.
    #[schemars(regex(pattern = name_pattern()))]
    pub name: Option<String>,
    /// Not supported: false is rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
    /// Wait until the store that hosts share has the snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub durable: Option<bool>,
    /// When the request is answered. Defaults to `stored`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ack: Option<SnapshotAck>,
}

/// When a request for a snapshot is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotAck {
    /// Once the memory is frozen in a process that survives the daemon.
    Captured,
    /// Once the files are complete on the host.
    Stored,
}

/// Purpose of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotPurpose {
    /// A booted template. Creates start from it.
    Template,
    /// Requested by a caller. It stays until it is removed.
    Asked,
    /// A fork. It is removed when nothing descends from it.
    Fork,
    /// A pause. It is removed when nothing descends from it.
    Pause,
    /// A step of a template's build, which later builds reuse.
    Step,
}

/// State of a snapshot in the store that hosts share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StoreState {
    /// On this host alone.
    Local,
    /// On this host, and being uploaded to the store.
    Uploading,
    /// In the store: other hosts can use it.
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
    /// Captured in memory, and not complete on disk yet.
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
    /// Its name, if it has one.
    pub names: Vec<String>,
    /// Completeness on this host.
    pub status: SnapshotStatus,
    /// Sandbox that it was taken of. Absent for a booted template.
    #[serde(rename = "originSandboxID", skip_serializing_if = "Option::is_none")]
    pub origin_sandbox_id: Option<String>,
    /// Template that it descends from.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Snapshot that it stores the difference from.
    #[serde(rename = "parentSnapshotID", skip_serializing_if = "Option::is_none")]
    pub parent_snapshot_id: Option<String>,
    /// Purpose that it was taken for.
    pub purpose: SnapshotPurpose,
    /// Virtual CPUs of its sandboxes.
    pub cpu_count: u8,
    /// Memory of its sandboxes in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Writable disk of its sandboxes in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// When it was taken.
    pub created_at: Moment,
    /// The same: snapshots do not change.
    pub updated_at: Moment,
    /// Time for which the guest was stopped, in milliseconds.
    #[schemars(range(min = 0.0))]
    pub stopped_ms: f64,
    /// Time from the request to the completion, in milliseconds; 0 until then.
    #[schemars(range(min = 0.0))]
    pub total_ms: f64,
    /// State in the store that hosts share. Absent without a store.
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
    /// Name chosen by its creator.
    pub name: Option<String>,
    /// Purpose that it was taken for.
    pub purpose: SnapshotPurpose,
    /// Sandbox that it was taken of; empty for a booted template.
    pub sandbox: String,
    /// API key of its sandbox; null: the host's owner.
    pub owner: Option<String>,
    /// Environment of its sandbox, the default of sandboxes created from it. Only the host's owner
    /// receives it.
    pub env: BTreeMap<String, String>,
    /// Template that it descends from.
    pub template: String,
    /// Fingerprint of what it depends on besides its parents.
    pub fingerprint: String,
    /// Size of sandboxes created from it.
    #[serde(flatten)]
    pub size: SandboxSize,
    /// Engine that took and restores it.
    pub engine: String,
    /// Snapshot that it stores the difference from.
    pub parent: Option<String>,
    /// True if it stays although nothing descends from it.
    pub kept: bool,
    /// Time for which the guest was stopped, in milliseconds.
    #[schemars(range(min = 0.0))]
    pub stopped_ms: f64,
    /// Time from the request to the completion, in milliseconds; 0 until then.
    #[schemars(range(min = 0.0))]
    pub total_ms: f64,
    /// Disk space that it takes itself, without the snapshots below it.
    pub bytes: u64,
    /// When it was taken, in milliseconds since 1970.
    pub created_ms: u64,
    /// True if it is captured in memory and not complete on disk yet. Absent: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub storing: bool,
}

impl SnapshotInfo {
    /// Returns whether a caller requested the snapshot: it is in lists, and counts in its owner's
    /// budget.
    pub fn is_asked_for(&self) -> bool {
        self.purpose == SnapshotPurpose::Asked && self.kept
    }
}

/// Result of comparing a snapshot with its checksums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifiedSnapshot {
    /// Id of the snapshot.
    pub id: String,
    /// True if it has checksums; without them nothing is known.
    pub sealed: bool,
    /// Chunks and files that differ.
    pub damaged: Vec<DamagedChunk>,
    /// True if it was damaged and has been fetched anew from the store. Absent: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mended: bool,
}

/// Chunk or file of a snapshot that differs from its checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DamagedChunk {
    /// File of the snapshot.
    pub file: String,
    /// Number of the 64 KiB chunk; null if the file is damaged as a whole.
    pub chunk: Option<u64>,
}
