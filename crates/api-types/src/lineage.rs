//! Lineage of sandboxes and snapshots.
//!
//! The *lineage* of a sandbox or snapshot consists of the snapshots and sandboxes that are
//! connected with it: ancestors, descendants, and sandboxes created from them.

use crate::parts::Moment;
use crate::sandbox_info::StateName;
use crate::snapshot::SnapshotPurpose;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Sandboxes and snapshots that are connected with a sandbox or snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Lineage {
    /// Sandboxes and snapshots, oldest first. Nodes of unknown age come last.
    pub nodes: Vec<LineageNode>,
    /// Relations between these nodes, oldest first.
    pub edges: Vec<LineageEdge>,
    /// True if the lineage has more than 5,000 nodes. The answer then has the nearest ones.
    pub truncated: bool,
}

/// Sandbox or snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LineageNode {
    /// Id of the sandbox or snapshot. For several snapshots: id of the newest one.
    pub id: String,
    /// Kind of the node.
    pub kind: LineageKind,
    /// State.
    pub state: LineageState,
    /// Name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Time at which the sandbox was created or the snapshot was taken. Absent if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Moment>,
    /// Purpose of a snapshot. Absent for a sandbox, and for a snapshot without a record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub purpose: Option<SnapshotPurpose>,
    /// Sandbox of which the snapshot was taken.
    #[serde(rename = "sandboxID", default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Nearest ancestor of the snapshot that is a node. For several snapshots: of the oldest one.
    #[serde(
        rename = "parentSnapshotID",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub parent_snapshot_id: Option<String>,
    /// Template that the sandbox or snapshot descends from. Absent for a removed one.
    #[serde(
        rename = "templateID",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub template_id: Option<String>,
    /// Memory in MiB. Absent for a removed sandbox or snapshot.
    #[serde(rename = "memoryMB", default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u32>,
    /// Writable disk in MiB. Absent for a removed sandbox or snapshot.
    #[serde(
        rename = "diskSizeMB",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub disk_size_mb: Option<u64>,
    /// Disk space of the snapshots in bytes, without their ancestors. Absent for a sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Number of snapshots that the node represents. A long series of automatic snapshots is one
    /// node, and so are consecutive removed snapshots. 1 for a sandbox.
    #[schemars(range(min = 1))]
    pub count: u64,
}

/// Kind of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LineageKind {
    /// Sandbox.
    Sandbox,
    /// Snapshot, or several consecutive snapshots.
    Snapshot,
}

/// State of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LineageState {
    /// The sandbox is being created.
    Creating,
    /// The sandbox runs.
    Running,
    /// The sandbox is stored as a snapshot.
    Paused,
    /// The guest of the sandbox was lost.
    Broken,
    /// The snapshot is captured in memory and not yet complete on disk.
    Storing,
    /// The snapshot is complete on disk.
    Ready,
    /// The sandbox was killed, or the snapshot was removed. Data of a removed snapshot remain as
    /// long as other objects need them.
    Removed,
}

impl LineageState {
    /// Name of the state.
    pub fn name(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Broken => "broken",
            Self::Storing => "storing",
            Self::Ready => "ready",
            Self::Removed => "removed",
        }
    }
}

impl From<StateName> for LineageState {
    fn from(state: StateName) -> Self {
        match state {
            StateName::Creating => Self::Creating,
            StateName::Running => Self::Running,
            StateName::Paused => Self::Paused,
            StateName::Broken => Self::Broken,
            StateName::Killed => Self::Removed,
        }
    }
}

/// Relation between two nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LineageEdge {
    /// Id of the node that has the relation.
    pub from: String,
    /// Id of the related node.
    pub to: String,
    /// Relation.
    pub relation: LineageRelation,
    /// Time at which the relation began. Absent if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Moment>,
}

/// Relation between a sandbox and a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LineageRelation {
    /// The snapshot `from` was taken of the sandbox `to`.
    SnapshotOf,
    /// The sandbox `from` was created or forked from the snapshot `to`.
    StartedFrom,
    /// The sandbox `from` was rolled back to the snapshot `to`. The latest 32 rollbacks of a
    /// sandbox are recorded.
    RolledBackTo,
}
