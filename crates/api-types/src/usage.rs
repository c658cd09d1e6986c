//! Usage of API keys by day.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Usage of one API key on one day.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DailyUsage {
    /// Day in UTC, like 2026-01-31.
    pub date: String,
    /// API key. Absent for the host's owner. `other` if the day has more than 10,000 keys.
    #[serde(default, rename = "keyID", skip_serializing_if = "Option::is_none")]
    pub key_id: Option<String>,
    /// Name of the API key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_name: Option<String>,
    /// Time of running sandboxes in seconds. A paused sandbox is not counted.
    pub sandbox_seconds: f64,
    /// Processor time of running sandboxes in seconds, measured on the host.
    pub cpu_seconds: f64,
    /// Memory size of running sandboxes in GiB, times seconds.
    pub memory_gib_seconds: f64,
    /// Disk space that counts towards the limit of the key in GiB, times seconds. 0 for the host's
    /// owner, who has no limit.
    pub stored_gib_seconds: f64,
    /// Maximum of this disk space in bytes, measured each minute. In a fleet: sum of the maximums
    /// of all hosts.
    pub stored_bytes: u64,
    /// Bytes that sandboxes have sent over their networks.
    pub sent_bytes: u64,
    /// Completed requests to functions.
    pub function_requests: u64,
}

/// Page of the usage of API keys, in the order of days and keys.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UsagePage {
    /// Usage. Days without usage are omitted.
    pub usage: Vec<DailyUsage>,
    /// Parameter `after` of the next page. Absent if this page is the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// Hosts of the fleet that did not answer, whose usage is missing. Absent if all answered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_hosts: Vec<String>,
}
