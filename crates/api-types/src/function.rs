//! WebAssembly functions.

use crate::parts::Moment;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Form of a request to deploy a function.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DeployFunction {
    /// Settings of the function.
    pub settings: DeploySettings,
    /// The module. Absent if the settings contain its digest.
    #[schemars(extend("contentMediaType" = "application/wasm"))]
    pub module: String,
}

/// Settings of a deployment. An absent setting retains its value, or has its default in a new
/// function.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct DeploySettings {
    /// Limits of a request.
    pub limits: DeployLimits,
    /// Environment variables. Answers show their names only.
    pub env: Option<BTreeMap<String, String>>,
    /// Hosts that the function may send requests to.
    pub allow: Option<Vec<String>>,
    /// True if requests need no key.
    pub public: Option<bool>,
    /// Schedule of requests in cron format. An empty string removes the schedule.
    pub schedule: Option<String>,
    /// Permissions of the function for its deployer's sandboxes. Defaults to no permissions.
    #[schemars(with = "Option<SandboxKeyScope>")]
    pub sandbox_key: Option<String>,
    /// Replace the function's key for sandboxes with a new key.
    pub renew_sandbox_key: bool,
    /// BLAKE3 hash of a module that the caller has already uploaded to this host or to the store.
    /// Replaces the form part `module`.
    pub digest: Option<String>,
}

/// Limits of a deployment. An absent limit retains its value, or has its default in a new function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct DeployLimits {
    /// Memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: Option<u32>,
    /// Processor time of a request in milliseconds.
    pub cpu_ms: Option<u32>,
    /// Duration of a request in milliseconds.
    pub timeout_ms: Option<u32>,
    /// Maximum number of simultaneous requests.
    pub concurrency: Option<u32>,
}

/// Permissions of a function for its deployer's sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SandboxKeyScope {
    /// Create, use and terminate sandboxes.
    Create,
    /// Read sandboxes.
    Read,
}

/// Body of a request to roll back a function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RollbackFunction {
    /// Version to activate. Defaults to the previous version.
    pub version: Option<u64>,
}

/// State of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FunctionState {
    /// Requests are answered.
    Enabled,
    /// Requests are rejected. The function remains deployed.
    Disabled,
}

/// State of a module in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ModuleState {
    /// Being uploaded.
    Uploading,
    /// In the store. Other hosts can use it.
    Stored,
}

/// A function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Function {
    /// Name of the function.
    pub name: String,
    /// API key that deployed the function; null if the host's owner did.
    pub owner: Option<String>,
    /// Name in URLs, unique on the host.
    pub label: String,
    /// State of the function.
    pub state: FunctionState,
    /// True if requests need no key.
    pub public: bool,
    /// Number of the active version.
    pub version: u64,
    /// Interface of the module.
    pub world: Option<String>,
    /// BLAKE3 hash of the module.
    pub digest: Option<String>,
    /// State of the module in the store. Absent without a store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_state: Option<ModuleState>,
    /// Path for requests through the control plane.
    pub path: String,
    /// URL for requests. Absent if the host has no domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// URL for direct requests, which bypass the gateway. Absent if the function is not public, or
    /// if the host has no port for direct requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct_url: Option<String>,
    /// Limits of a request.
    pub limits: FunctionLimits,
    /// Names of the environment variables.
    pub env_names: Vec<String>,
    /// Hosts that the function may send requests to.
    pub allow: Vec<String>,
    /// Permissions for the deployer's sandboxes.
    pub sandbox_key: Option<SandboxKeyScope>,
    /// Schedule. Absent if the function has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<FunctionSchedule>,
    /// Time of the first deployment.
    pub created_at: Moment,
    /// Time of the last change.
    pub updated_at: Moment,
    /// Request counts. Absent in lists and in answers to changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<FunctionMetrics>,
}

/// Limits of requests to a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FunctionLimits {
    /// Memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Processor time of a request in milliseconds.
    pub cpu_ms: u32,
    /// Duration of a request in milliseconds.
    pub timeout_ms: u32,
    /// Maximum number of simultaneous requests.
    pub concurrency: u32,
}

/// Schedule of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FunctionSchedule {
    /// Schedule in cron format.
    pub cron: String,
    /// Time of the next request; null while the function is disabled.
    pub next_at: Option<Moment>,
    /// Time of the last request.
    pub last_at: Option<Moment>,
    /// Status of the last request's response.
    pub last_status: Option<u16>,
    /// Number of scheduled requests that were missed because no daemon ran.
    pub missed: u64,
    /// Number of scheduled requests that were skipped because the previous request was still
    /// running.
    pub skipped: u64,
}

/// Version of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FunctionVersion {
    /// Number of the version.
    pub version: u64,
    /// True if this version is active.
    pub answers: bool,
    /// Interface of the module.
    pub world: String,
    /// Size of the module in bytes.
    pub bytes: u64,
    /// BLAKE3 hash of the module.
    pub digest: String,
    /// State of the module in the store. Absent without a store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_state: Option<ModuleState>,
    /// Time of the deployment.
    pub created_at: Moment,
}

/// Page of a function's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FunctionLog {
    /// Entries, oldest first.
    pub entries: Vec<FunctionLogEntry>,
    /// Position after the last entry: the next value of `after`.
    pub next: String,
}

/// Entry of a function's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FunctionLogEntry {
    /// Number of the entry. Numbers are consecutive.
    pub sequence: u64,
    /// Time of the entry.
    pub timestamp: Moment,
    /// Request that wrote the entry.
    #[serde(rename = "requestID")]
    pub request_id: String,
    /// Source of the entry.
    pub stream: LogStream,
    /// Text. Bytes that are not UTF-8 are replaced.
    pub text: String,
}

/// Source of an entry of a function's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogStream {
    /// Standard output of the function.
    Stdout,
    /// Standard error of the function.
    Stderr,
    /// Failure of a request.
    Fault,
}

/// Counts of a function's requests since the daemon started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FunctionMetrics {
    /// Completed requests.
    pub requests: u64,
    /// Requests in flight.
    pub running: u64,
    /// Processor time of all requests in microseconds.
    pub cpu_us: u64,
    /// Duration of all requests in microseconds.
    pub latency_us: u64,
    /// Requests by duration.
    pub latency_buckets: Vec<LatencyBucket>,
    /// Failed requests by kind of the failure.
    pub faults: BTreeMap<String, u64>,
}

/// Requests with a duration up to an upper bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LatencyBucket {
    /// Upper bound in microseconds; null in the last bucket, which has no bound.
    pub le_us: Option<u64>,
    /// Number of requests above the bound of the previous bucket.
    pub count: u64,
}
