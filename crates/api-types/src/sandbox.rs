//! Answers about sandboxes: the fields of E2B and further fields of Jiffy.
//!
//! A *fork* creates children of a running sandbox. A *promotion* retains one child and removes its
//! siblings.

use crate::engine::BootMode;
use crate::error::ErrorBody;
use crate::network::SandboxNetwork;
use crate::parts::Moment;
use crate::sandbox_info::{OnTimeout, SandboxInfo, StateName};
use crate::snapshot::{SnapshotContent, StoreState};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Answer to requests that create, resume, restart or connect to a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// Template of the sandbox.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Id of the sandbox.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Name of the host software.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// Version of the envd protocol.
    pub envd_version: String,
    /// Name of the template.
    pub alias: String,
    /// Token that the sandbox's agent requires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// Token that the sandbox's ports require if traffic is restricted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traffic_access_token: Option<String>,
    /// Domain of the sandbox's host names.
    pub domain: Option<String>,
    #[serde(flatten)]
    pub added: JiffyFields,
}

/// Fields that Jiffy adds to E2B's fields.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JiffyFields {
    /// Name of the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Sandbox that this sandbox was forked from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forked_from: Option<String>,
    /// Latest snapshot that the sandbox descends from.
    #[serde(rename = "snapshotID", skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
    /// Origin of its guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_mode: Option<BootMode>,
    /// Engine that isolates the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// Time from the request to the agent's answer, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0))]
    pub boot_ms: Option<f64>,
    /// State of a paused sandbox's snapshot in the store. Absent if the sandbox is not paused, or
    /// without a store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_state: Option<StoreState>,
    /// All details. Only the host's owner receives secrets.
    pub jiffy: SandboxInfo,
}

/// A sandbox in a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ListedSandbox {
    /// Template of the sandbox.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Id of the sandbox.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Name of the host software.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// Name of the template.
    pub alias: String,
    /// Time of the creation.
    pub started_at: Moment,
    /// Timeout, in the year 2999 if the sandbox has none. If the sandbox does not run, the time at
    /// which it was paused, lost or killed.
    pub end_at: Moment,
    /// Virtual CPUs.
    pub cpu_count: u8,
    /// Memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Writable disk in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// State of the sandbox.
    pub state: StateName,
    /// Version of the envd protocol.
    pub envd_version: String,
    /// Metadata chosen by the creator.
    pub metadata: BTreeMap<String, String>,
    /// Mounted volumes.
    pub volume_mounts: Vec<VolumeMount>,
    /// Host of the fleet that has the sandbox, as `h1`. Absent without a fleet, and if the host is
    /// lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Reason why the host could not serve the sandbox's disk. Its programs received I/O errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_failure: Option<String>,
    #[serde(flatten)]
    pub added: JiffyFields,
}

/// A mounted volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeMount {
    /// Name of the volume.
    pub name: String,
    /// Directory in the sandbox.
    pub path: String,
    /// True if the sandbox cannot change the volume. Absent otherwise, as in E2B's form.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// A sandbox with its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxDetail {
    #[serde(flatten)]
    pub listed: ListedSandbox,
    /// Token that the sandbox's agent requires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// Domain of the sandbox's host names.
    pub domain: Option<String>,
    /// Access to the internet. Null allows it.
    pub allow_internet_access: Option<bool>,
    /// Network rules.
    pub network: SandboxNetwork,
    /// Behaviour at the timeout.
    pub lifecycle: Lifecycle,
    /// Content of the pause. Absent if the sandbox is not paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause_mode: Option<SnapshotContent>,
}

/// Behaviour of a sandbox at its timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// Action at the timeout.
    pub on_timeout: OnTimeout,
    /// True if traffic resumes the sandbox.
    pub auto_resume: bool,
}

/// Result for one child of a fork: a sandbox or an error.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Forked {
    /// Snapshot that all children start from.
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
    /// The child. Absent if it was not created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
    /// Error if the child was not created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}

/// Answer to a promotion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Promoted {
    /// Id of the sandbox.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Ids of the siblings that were removed.
    pub removed: Vec<String>,
    /// Details of the removed siblings.
    pub jiffy: Vec<SandboxInfo>,
}

/// Answer to a rollback.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolledBack {
    /// Id of the sandbox.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Snapshot that the sandbox was rolled back to.
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
    /// Id of the operation.
    #[serde(rename = "operationID")]
    pub operation_id: String,
    /// Status of the operation.
    pub status: RollbackStatus,
    /// Time from the request to the agent's answer, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0))]
    pub boot_ms: Option<f64>,
    /// Details of the sandbox.
    pub jiffy: SandboxInfo,
}

/// Status of a rollback.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RollbackStatus {
    /// The sandbox has the state of the snapshot.
    Completed,
}

/// Answer to a wait.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Waited {
    /// Id of the sandbox.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// State of the sandbox now, or when the maximum time was over.
    pub state: StateName,
    /// Details of the sandbox.
    pub jiffy: SandboxInfo,
    /// Reason why the sandbox is broken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}
