//! The host, its keys, its warm pools, and removal of unused data.
//!
//! A *warm pool* contains started guests that are not assigned to a sandbox yet. An *exchange* is a
//! request to a sandbox with its response, or a stream.

use crate::parts::Moment;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Answer to a health check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Health {
    /// Always `ok`.
    pub status: HealthStatus,
}

/// Result of a health check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HealthStatus {
    /// Healthy.
    Ok,
}

/// Daemon and free resources of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Host {
    /// Version of the daemon.
    pub version: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Number of running sandboxes.
    pub running: usize,
    /// Number of guests in warm pools.
    pub warm: usize,
    /// Description of the sandboxes' network.
    pub network: String,
    /// Memory of the host in MiB.
    #[serde(rename = "memoryTotalMB")]
    pub memory_total_mb: Option<u64>,
    /// Available memory of the host in MiB.
    #[serde(rename = "memoryAvailableMB")]
    pub memory_available_mb: Option<u64>,
    /// Limit of the memory promised to guests, in MiB.
    #[serde(rename = "memoryLimitMB")]
    pub memory_limit_mb: Option<u64>,
    /// Size of the data directory's file system in MiB.
    #[serde(rename = "diskTotalMB")]
    pub disk_total_mb: Option<u64>,
    /// Free space of the data directory's file system in MiB.
    #[serde(rename = "diskFreeMB")]
    pub disk_free_mb: Option<u64>,
    /// Details of the daemon. Only the host's owner receives them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jiffy: Option<DaemonStatus>,
}

/// Details of a daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DaemonStatus {
    /// Version of the daemon.
    pub version: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Time since its start in seconds.
    pub uptime_s: u64,
    /// Address of the API; null if the daemon accepts requests only on its socket.
    pub listen: Option<String>,
    /// Arguments after `jiffy serve`.
    pub arguments: Vec<String>,
    /// Number of sandboxes by state.
    pub sandboxes: BTreeMap<String, usize>,
    /// Number of guests in warm pools.
    pub warm: usize,
    /// Protections that are missing because the daemon does not run as root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rootless: Option<String>,
    /// Description of the sandboxes' network.
    #[serde(default)]
    pub network: String,
    /// Number of snapshots.
    pub snapshots: usize,
    /// Memory promised to all guests, in MiB.
    pub memory_committed_mib: u64,
    /// Limit of the memory promised to guests, in MiB.
    pub memory_limit_mib: Option<u64>,
    /// Available memory of the host in MiB.
    pub memory_available_mib: Option<u64>,
    /// Number of rejected requests by exhausted resource.
    pub refused: BTreeMap<String, u64>,
}

/// Body of a request to stop the daemon.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct StopHost {
    /// Kill the running sandboxes. By default they continue to run, and the next daemon adopts
    /// them.
    pub kill_sandboxes: bool,
}

/// Body of a request to revoke a key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RevokeKey {
    /// Kill the key's running and paused sandboxes, and cancel its builds.
    pub end: bool,
}

/// A revoked key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RevokedKey {
    /// Id of the key.
    #[serde(rename = "keyID")]
    pub key_id: String,
    /// Name of the key.
    pub name: String,
    /// Time of the revocation.
    pub revoked_at: Moment,
    /// Number of killed sandboxes. Absent unless `end` was true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandboxes: Option<usize>,
    /// Number of cancelled builds. Absent unless `end` was true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub builds: Option<usize>,
    /// Hosts of the fleet that have not confirmed the revocation within a second. They reject the
    /// key when they have contact with the fleet again, or after 60 s without contact. Absent if
    /// all hosts have confirmed it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unconfirmed_hosts: Vec<String>,
}

/// Limits and usage of a key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Budget {
    /// Id of the key.
    #[serde(rename = "keyID")]
    pub key_id: String,
    /// Name of the key.
    pub name: String,
    /// Limits in force.
    pub limits: BudgetLimits,
    /// Usage.
    pub used: BudgetUsage,
}

/// Limits of a key. A limit is null if the key has no such limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BudgetLimits {
    /// Running sandboxes.
    pub sandboxes: Option<u32>,
    /// Virtual CPUs of running sandboxes.
    pub vcpus: Option<u32>,
    /// Memory of running sandboxes in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: Option<u32>,
    /// New sandboxes per minute.
    pub creates_per_minute: Option<u32>,
    /// Sandboxes that are paused, or will be paused at their timeout.
    pub paused: Option<u32>,
    /// Snapshots.
    pub snapshots: Option<u32>,
    /// Tags of templates.
    pub templates: Option<u32>,
    /// Waiting and running builds.
    pub builds: Option<u32>,
    /// Simultaneous requests and streams to sandboxes.
    pub exchanges: Option<u64>,
    /// Disk space in bytes.
    pub disk_bytes: Option<u64>,
}

/// Usage by a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BudgetUsage {
    /// Running sandboxes.
    pub sandboxes: u64,
    /// Virtual CPUs of running sandboxes.
    pub vcpus: u64,
    /// Memory of running sandboxes in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// Sandboxes that are paused, or will be paused at their timeout.
    pub paused: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Tags of templates.
    pub templates: u64,
    /// Waiting and running builds.
    pub builds: u64,
    /// Uploaded files.
    pub uploads: u64,
    /// Requests and streams to sandboxes.
    pub exchanges: u64,
    /// Disk space in bytes.
    pub disk_bytes: u64,
    /// Disk space by purpose.
    pub disk: DiskUsage,
}

/// Disk space in bytes by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiskUsage {
    /// Paused sandboxes.
    pub paused: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Templates.
    pub templates: u64,
    /// Uploaded files.
    pub uploads: u64,
    /// Steps of builds.
    pub build_steps: u64,
    /// Functions.
    pub functions: u64,
    /// Volumes, with their maximum sizes.
    #[serde(default)]
    pub volumes: u64,
}

/// Team of a host. Clients of E2B expect one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Team {
    /// Id of the team.
    #[serde(rename = "teamID")]
    pub team_id: String,
    /// Name of the team.
    pub name: String,
    /// Name of the team in URLs.
    pub slug: String,
    /// Always empty.
    pub api_key: String,
    /// Always true.
    pub is_default: bool,
}

/// Body of a request to set the size of a warm pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SetPool {
    /// Number of guests that the pool contains when it is full.
    #[schemars(range(min = 0, max = 1000))]
    pub size: u64,
}

/// A warm pool: guests of a template that are ready to become sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Pool {
    /// Template of the guests.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Number of guests that the pool contains when it is full.
    pub size: usize,
    /// Number of guests that are ready.
    pub ready: usize,
}

/// Body of a request to remove unused data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PruneHost {
    /// Report the items that would be removed, and remove nothing.
    pub dry_run: bool,
    /// Minimum time without use in seconds.
    pub unused_seconds: u64,
}

/// Removed items, or items that would be removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PrunedHost {
    /// True if the items were only reported.
    pub dry_run: bool,
    /// Disk space of all items in bytes.
    pub bytes: u64,
    /// Items.
    pub items: Vec<PruneItem>,
}

/// Unused item.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PruneItem {
    /// Kind of the item.
    pub kind: PruneKind,
    /// Id or name of the item.
    pub id: String,
    /// Name of the sandbox, or of the template that the item belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Disk space of the item in bytes.
    pub bytes: u64,
}

/// Kind of an unused item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PruneKind {
    /// Record of a killed sandbox.
    Sandbox,
    /// Snapshot of a booted template.
    Snapshot,
    /// Template of an image that was imported for sandboxes.
    Template,
    /// Snapshot of a step of a build.
    Step,
    /// Image or files of builds and templates that no longer exist.
    Image,
    /// Files that were uploaded for builds.
    Upload,
}

impl PruneKind {
    /// Name of the kind.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox",
            Self::Snapshot => "snapshot",
            Self::Template => "template",
            Self::Step => "step",
            Self::Image => "image",
            Self::Upload => "upload",
        }
    }
}
