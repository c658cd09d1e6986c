//! Bodies of requests about sandboxes.

use crate::identity_token::NewIdentity;
use crate::network::NetworkBody;
use crate::parts::MAX_TIMEOUT_S;
use crate::sandbox_info::OnTimeout;
use crate::size::SandboxSize;
use crate::volume::NewVolumeMount;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Maximum length of a sandbox's name, as for a label of a host name.
pub const MAX_SANDBOX_NAME: usize = 63;
/// Maximum number of metadata entries and of environment variables.
pub const MAX_PAIRS: usize = 256;
/// Maximum length of the name of an entry.
pub const MAX_NAME: usize = 256;
/// Maximum length of the value of an entry.
pub const MAX_VALUE: usize = 8192;
/// Maximum size in bytes of a sandbox's certificate authorities in PEM.
pub const MAX_AUTHORITIES_BYTES: usize = 64 * 1024;
/// Maximum length of a proxy's URL in bytes.
pub const MAX_PROXY_URL: usize = 2048;
/// Maximum length of the list of hosts without a proxy in bytes.
pub const MAX_NO_PROXY: usize = 4096;
/// Maximum duration of a refresh in seconds.
pub const MAX_REFRESH_S: u64 = 3600;
/// Maximum time in milliseconds that processes have to exit before a restart.
pub const MAX_RESTART_GRACE_MS: u64 = 60_000;
/// Maximum number of children of a fork.
const MAX_CHILDREN: u64 = 100;

fn name_pattern() -> String {
    format!("^[A-Za-z0-9][A-Za-z0-9._-]{{0,{}}}$", MAX_SANDBOX_NAME - 1)
}

fn pair_names(pattern: &str) -> Value {
    json!({ "type": "string", "pattern": pattern, "maxLength": MAX_NAME })
}

fn metadata_names() -> Value {
    pair_names("^(?!host-mount$)")
}

fn variable_names() -> Value {
    pair_names("^[^=\\u0000]+$")
}

fn pair_values() -> Value {
    json!({ "type": "string", "maxLength": MAX_VALUE, "pattern": "^[^\\u0000]*$" })
}

/// Body of a request to create a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    /// Name of a template, or id or name of a snapshot.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Timeout in seconds. -1 means no limit. Defaults to 300.
    #[schemars(range(min = -1, max = MAX_TIMEOUT_S))]
    pub timeout: Option<i64>,
    /// Pause the sandbox at its timeout instead of killing it.
    pub auto_pause: Option<bool>,
    /// False to pause without memory at the timeout: the sandbox boots from its disk at the next
    /// resume. Defaults to true.
    pub auto_pause_memory: Option<bool>,
    /// Time without use in seconds after which the sandbox is paused. 0 means never. Defaults to
    /// the idle timeout of the template, or of the key.
    #[schemars(range(max = MAX_TIMEOUT_S))]
    pub idle_timeout: Option<u64>,
    /// Resume the paused sandbox when traffic arrives. Defaults to true if the sandbox has an idle
    /// timeout.
    pub auto_resume: Option<AutoResume>,
    /// Require a token at the sandbox's agent. Always true in `POST /v2/sandboxes`.
    pub secure: Option<bool>,
    /// Access to the internet. Defaults to true.
    #[serde(rename = "allow_internet_access")]
    pub allow_internet_access: Option<bool>,
    /// Network rules.
    pub network: Option<NetworkBody>,
    /// Metadata, by which lists can be filtered.
    #[schemars(extend(
        "maxProperties" = MAX_PAIRS,
        "propertyNames" = metadata_names(),
        "additionalProperties" = pair_values()
    ))]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Environment variables.
    #[schemars(extend(
        "maxProperties" = MAX_PAIRS,
        "propertyNames" = variable_names(),
        "additionalProperties" = pair_values()
    ))]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// Environment variables under the name that other clients use. Ignored if `envVars` is
    /// present.
    #[schemars(extend(
        "maxProperties" = MAX_PAIRS,
        "propertyNames" = variable_names(),
        "additionalProperties" = pair_values()
    ))]
    pub envs: Option<BTreeMap<String, String>>,
    /// Behaviour at the timeout in the form of newer clients.
    pub lifecycle: Option<NewLifecycle>,
    /// Servers for the template `mcp-gateway`. The daemon only checks their names: clients of E2B
    /// start the gateway by a command after the create.
    pub mcp: Option<Map<String, Value>>,
    /// Identity of the sandbox towards other services.
    pub iam: Option<NewIdentity>,
    /// Volumes to mount, at most 16. Requires the engine `microvm`.
    #[schemars(length(max = 16))]
    pub volume_mounts: Option<Vec<NewVolumeMount>>,
    /// Virtual CPUs. Defaults to the template's number.
    #[schemars(range(min = 1, max = SandboxSize::MAX_VCPUS))]
    pub cpu_count: Option<u8>,
    /// Memory in MiB. Defaults to the template's size.
    #[serde(rename = "memoryMB")]
    #[schemars(range(min = SandboxSize::MIN_MEMORY_MIB, max = SandboxSize::MAX_MEMORY_MIB))]
    pub memory_mb: Option<u32>,
    /// Writable disk in MiB. Defaults to the template's size.
    #[serde(rename = "diskSizeMB")]
    #[schemars(range(min = SandboxSize::MIN_DISK_MIB, max = SandboxSize::MAX_DISK_MIB))]
    pub disk_size_mb: Option<u64>,
    /// Name, unique among the caller's sandboxes. Calls accept the name instead of the id.
    #[schemars(regex(pattern = name_pattern()))]
    pub name: Option<String>,
    /// Engine that isolates the sandbox. Defaults to the snapshot's or the host's engine.
    #[schemars(extend("enum" = [Some("microvm"), Some("gvisor"), None::<&str>]))]
    pub engine: Option<String>,
    /// Memory that is fetched in advance if the snapshot is in the store. Defaults to
    /// `working_set`.
    pub prefetch: Option<Prefetch>,
    /// Certificate authorities that the sandbox's programs trust, in PEM.
    #[schemars(length(max = MAX_AUTHORITIES_BYTES))]
    pub ca_certificates: Option<String>,
    /// Proxy of the sandbox's programs.
    pub proxy: Option<Proxy>,
    /// Action after the loss of the host in a fleet. Defaults to `wait`.
    pub on_node_loss: Option<OnNodeLoss>,
    /// Labels that the host of the sandbox must have, in a fleet. At most 16.
    pub host_labels: Option<BTreeMap<String, String>>,
    /// Hosts that may run the sandbox, in a fleet: ids such as `h2`, or addresses. All hosts if
    /// empty. A host that is in no fleet runs the sandbox itself.
    #[schemars(length(max = MAX_SCOPE), inner(length(min = 1, max = MAX_SCOPE_ENTRY)))]
    pub distribution_scope: Option<Vec<String>>,
}

/// Maximum number of hosts in `distributionScope`.
pub const MAX_SCOPE: usize = 16;
/// Maximum length of an id or address in `distributionScope`.
pub const MAX_SCOPE_ENTRY: usize = 253;

/// Action after the loss of the host of a running sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnNodeLoss {
    /// The sandbox is broken until its host returns.
    #[default]
    Wait,
    /// Not supported: rejected.
    Restore,
}

/// Resume of a paused sandbox by traffic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AutoResume {
    /// True if traffic resumes the sandbox.
    pub enabled: Option<bool>,
}

/// Behaviour of a new sandbox at its timeout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NewLifecycle {
    /// Action at the timeout. Defaults to `kill`.
    pub on_timeout: Option<OnTimeout>,
    /// True if traffic resumes the sandbox.
    pub auto_resume: Option<bool>,
}

/// Memory of a snapshot in the store that is fetched before the guest accesses it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Prefetch {
    /// The working set, before the sandbox runs.
    #[default]
    WorkingSet,
    /// The working set before the sandbox runs, and the remainder while it runs.
    All,
}

/// Proxy of a sandbox's programs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Proxy {
    /// `http://[USER:PASSWORD@]HOST[:PORT]`. An empty string disables the host's proxy.
    #[schemars(length(max = MAX_PROXY_URL))]
    pub url: String,
    /// Hosts that programs reach without the proxy, separated by commas.
    #[schemars(length(max = MAX_NO_PROXY))]
    pub no_proxy: Option<String>,
}

/// Body of a request to rename a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend("required" = ["name"]))]
pub struct ChangeSandbox {
    /// New name, unique among the caller's sandboxes. Null removes the name.
    #[serde(deserialize_with = "Option::deserialize")]
    #[schemars(regex(pattern = name_pattern()))]
    pub name: Option<String>,
}

/// Body of a request to connect to a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ConnectSandbox {
    /// Minimum timeout from now in seconds. -1 means no limit.
    #[schemars(range(min = -1, max = MAX_TIMEOUT_S))]
    pub timeout: Option<i64>,
    /// False to discard the memory of a paused sandbox: the sandbox boots from its disk and runs
    /// the start command of its template. Defaults to true.
    pub memory: Option<bool>,
    /// Ignored.
    pub auto_pause: Option<bool>,
}

/// Body of a request to resume a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ResumeSandbox {
    /// Minimum timeout from now in seconds. -1 means no limit.
    #[schemars(range(min = -1, max = MAX_TIMEOUT_S))]
    pub timeout: Option<i64>,
    /// False to discard the memory of a paused sandbox: the sandbox boots from its disk and runs
    /// the start command of its template. Defaults to true.
    pub memory: Option<bool>,
    /// Pause the sandbox at its timeout instead of killing it.
    pub auto_pause: Option<bool>,
    /// State to use if the host of the sandbox was lost. `null` for the newest state only.
    pub from: Option<ResumeFrom>,
}

/// State from which a sandbox is resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResumeFrom {
    /// Newest state in the store. If the host of the sandbox was lost, the state may be older than
    /// the last state on that host; the response then has the header `jiffy-resumed-from: stored`.
    Stored,
}

/// Body of a request to pause a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PauseSandbox {
    /// False to store the disk only: the sandbox boots from it at the next resume. Defaults to
    /// true.
    pub memory: Option<bool>,
    /// Fail if the sandbox's agent does not respond.
    pub require_healthy_guest: Option<bool>,
    /// Wait until the store has the snapshot.
    pub durable: Option<bool>,
}

/// Body of a request to set the timeout or the idle timeout of a sandbox. At least one of them is
/// required.
// The schema does not express this rule: generators of clients have no class for alternatives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SetTimeout {
    /// Timeout from now in seconds. -1 means no limit. Absent to retain the timeout.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = -1, max = MAX_TIMEOUT_S))]
    pub timeout: Option<i64>,
    /// Time without use in seconds, counted from now, after which the sandbox is paused. 0 means
    /// never. Absent to retain the idle timeout.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_TIMEOUT_S))]
    pub idle_timeout: Option<u64>,
}

/// Body of a request to extend a sandbox's timeout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Refresh {
    /// Minimum timeout from now in seconds.
    #[schemars(range(min = 0, max = MAX_REFRESH_S))]
    pub duration: Option<u64>,
}

/// Body of a request to fork a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ForkSandbox {
    /// Timeout of the children in seconds. -1 means no limit.
    #[schemars(range(min = -1, max = MAX_TIMEOUT_S))]
    pub timeout: Option<i64>,
    /// Number of children. Defaults to 1.
    #[schemars(range(min = 1, max = MAX_CHILDREN))]
    pub count: Option<u64>,
}

/// Body of a request to roll back a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RollbackSandbox {
    /// Id or name of a snapshot.
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
}

/// Body of a request to restart a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RestartSandbox {
    /// Time in milliseconds between SIGTERM and SIGKILL. Defaults to 10,000.
    #[schemars(range(min = 0, max = MAX_RESTART_GRACE_MS))]
    pub grace_ms: Option<u64>,
}
