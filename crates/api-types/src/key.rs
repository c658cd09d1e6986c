//! API keys.

use crate::parts::{MAX_TIMEOUT_S, Moment};
use crate::snapshot::SnapshotAck;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Scope of an API key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KeyScope {
    /// Full access.
    Admin,
    /// Access to its own resources.
    #[default]
    Create,
    /// Read access to all resources, without secrets.
    Read,
}

/// Limits of an API key. An absent limit means that the key has no such limit of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct KeyLimits {
    /// Running sandboxes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandboxes: Option<u32>,
    /// Virtual CPUs of running sandboxes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u32>,
    /// Memory of running sandboxes in MiB.
    #[serde(rename = "memoryMB", skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u32>,
    /// New sandboxes per minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creates_per_minute: Option<u32>,
    /// Sandboxes that are paused, or will be paused at their timeout or when they are idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<u32>,
    /// Snapshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<u32>,
    /// Tags of templates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub templates: Option<u32>,
    /// Waiting and running builds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub builds: Option<u32>,
    /// Simultaneous requests and streams to sandboxes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchanges: Option<u32>,
    /// Disk space in MiB. A volume counts with its size.
    #[serde(rename = "diskMB", skip_serializing_if = "Option::is_none")]
    pub disk_mb: Option<u64>,
    /// Idle timeout in seconds of new sandboxes whose create and template set none. 0 means none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_TIMEOUT_S))]
    pub idle_timeout: Option<u64>,
    /// Time at which a request of the key for a snapshot is answered if it has no `ack`. Defaults
    /// to the daemon's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_ack: Option<SnapshotAck>,
}

/// Limit of an API key, by its name in `KeyLimits`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum KeyLimit {
    /// Running sandboxes.
    Sandboxes,
    /// Virtual CPUs of running sandboxes.
    Vcpus,
    /// Memory of running sandboxes.
    #[serde(rename = "memoryMB")]
    MemoryMb,
    /// New sandboxes per minute.
    CreatesPerMinute,
    /// Paused sandboxes.
    Paused,
    /// Snapshots.
    Snapshots,
    /// Tags of templates.
    Templates,
    /// Waiting and running builds.
    Builds,
    /// Simultaneous requests and streams to sandboxes.
    Exchanges,
    /// Disk space.
    #[serde(rename = "diskMB")]
    DiskMb,
    /// Idle timeout of new sandboxes.
    IdleTimeout,
    /// Time at which requests for snapshots are answered.
    SnapshotAck,
}

/// Body of a request to change an API key.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ChangeKey {
    /// New limits. Absent limits do not change.
    pub limits: KeyLimits,
    /// Limits that the key no longer has.
    pub remove_limits: Vec<KeyLimit>,
}

/// An API key, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ApiKey {
    /// Id of the key.
    #[serde(rename = "keyID")]
    pub key_id: String,
    /// Name of the key.
    pub name: String,
    /// Scope.
    pub scope: KeyScope,
    /// Limits of the key.
    pub limits: KeyLimits,
    /// Creation time.
    pub created_at: Moment,
    /// Time of the last use, with a precision of one minute. In a fleet: on the host that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_at: Option<Moment>,
    /// Time of the revocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<Moment>,
    /// Expiry time. Absent if the key does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Moment>,
    /// Networks in CIDR notation from which the key may be used. Absent if all addresses may use
    /// it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
}

/// Body of a request to create an API key.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CreateKey {
    /// Name of the key: 1 to 100 printable characters. Defaults to `unnamed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Scope. Defaults to `create`.
    pub scope: KeyScope,
    /// Limits of the key.
    pub limits: KeyLimits,
    /// Expiry time. The key does not expire by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Moment>,
    /// Addresses, and networks in CIDR notation, from which the key may be used. All by default.
    pub addresses: Vec<String>,
}

/// Body of a request to replace the secret of an API key.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RotateKey {
    /// Time in milliseconds for which the previous secret remains valid. Defaults to 0.
    pub overlap_ms: u64,
    /// New expiry time. Absent if it does not change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Moment>,
}

/// An API key with its secret, which is not shown again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewApiKey {
    /// Key.
    pub key: ApiKey,
    /// Secret, for the header `X-API-KEY`.
    pub secret: String,
}
