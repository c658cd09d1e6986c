//! Observations of sandboxes: usage, logs, connections, links.

use crate::parts::Moment;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// VMM process of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Process {
    /// Process id of the VMM.
    pub pid: u32,
    /// KVM exits so far; null if the kernel does not count exits.
    pub exits: Option<u64>,
}

/// Usage of a sandbox at one moment. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Metric {
    /// Time of the sample.
    pub timestamp: Moment,
    /// Time of the sample in seconds since 1970.
    pub timestamp_unix: u64,
    /// Virtual CPUs.
    pub cpu_count: u8,
    /// Usage of all virtual CPUs together, in percent.
    #[schemars(range(min = 0.0))]
    pub cpu_used_pct: f64,
    /// Memory in use.
    pub mem_used: u64,
    /// Memory in total.
    pub mem_total: u64,
    /// Memory used as page cache.
    pub mem_cache: u64,
    /// Disk space in use.
    pub disk_used: u64,
    /// Disk space in total.
    pub disk_total: u64,
    /// Bytes sent since the guest started. Absent without a network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net_bytes_out: Option<u64>,
    /// Bytes received since the guest started. Absent without a network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net_bytes_in: Option<u64>,
}

/// Latest usage of several sandboxes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AllMetrics {
    /// Usage by id of the sandbox.
    pub sandboxes: BTreeMap<String, Metric>,
}

/// Severity of a log line.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Standard output of programs, and details.
    Debug,
    /// Progress.
    Info,
    /// Warning.
    Warn,
    /// Failure.
    Error,
}

impl LogLevel {
    /// All levels.
    pub const ALL: [Self; 4] = [Self::Debug, Self::Info, Self::Warn, Self::Error];

    /// Name of the level.
    pub fn name(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

/// Entry of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LogEntry {
    /// Time of the entry.
    pub timestamp: Moment,
    /// Text.
    pub message: String,
    /// Severity.
    pub level: LogLevel,
    /// Step of the build that the entry belongs to: its number from 1, `base` or `finalize`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// Further fields. Always empty for consoles, absent for builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fields: Option<BTreeMap<String, String>>,
}

/// Line of a console.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConsoleLine {
    /// Time of the line.
    pub timestamp: Moment,
    /// JSON object with `level`, `logger` and `message`.
    pub line: String,
}

/// Last lines of a console.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Logs {
    /// Lines, oldest first.
    pub logs: Vec<ConsoleLine>,
    /// The lines of `logs` as entries.
    pub log_entries: Vec<LogEntry>,
}

/// Lines of a console.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LogsV2 {
    /// Lines.
    pub logs: Vec<LogEntry>,
}

/// Decision about a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The connection was allowed.
    Allowed,
    /// The connection was rejected.
    Refused,
}

/// Reason for rejecting a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RefusalReason {
    /// The sandbox's rules deny the destination.
    Rules,
    /// A limit of the sandbox's network was reached.
    Limit,
    /// The host denies the destination to all sandboxes.
    Host,
    /// The host cannot add headers to requests to the destination, because the certificate
    /// authority of the sandbox is from another host.
    Authority,
    /// The egress proxy of the sandbox did not connect to the destination.
    Proxy,
}

/// Connection of a sandbox, or a DNS query.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Connection {
    /// Start of the connection. Of several equal connections, the start of the last.
    pub timestamp: Moment,
    /// Protocol.
    pub protocol: String,
    /// Destination address; null for a DNS query.
    pub address: Option<String>,
    /// Destination port; null if the protocol has no ports.
    pub port: Option<u16>,
    /// Queried name, or the name that the connection sent (TLS server name, `Host`).
    pub host: Option<String>,
    /// Record type of a DNS query.
    pub question: Option<String>,
    /// Bytes sent so far; null if unknown.
    pub bytes_out: Option<u64>,
    /// Bytes received so far; null if unknown.
    pub bytes_in: Option<u64>,
    /// Decision: allowed or rejected.
    pub verdict: Verdict,
    /// Reason of a rejection.
    pub reason: Option<RefusalReason>,
    /// Request to a host that rules for headers name. Absent for other entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<HeaderRequest>,
    /// Number of connections that differ only in their time.
    #[schemars(range(min = 1))]
    pub times: u64,
}

/// Request to a host that rules for headers name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HeaderRequest {
    /// Method.
    pub method: String,
    /// Status of the response.
    pub status: u16,
    /// Name of the rule. Absent if no rule with a name applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Names of the secrets that the request contained.
    pub secrets: Vec<String>,
    /// Names of the identity tokens that the request contained. Absent if it contained none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<String>,
}

/// Connections of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Connections {
    /// Start of the record; null if the sandbox has no network.
    pub since: Option<Moment>,
    /// Newest connections, oldest first.
    pub connections: Vec<Connection>,
    /// Number of further connections since then, as far as known.
    pub missing: u64,
    /// Information that the host's kernel does not provide: `connections`, `bytes`, `refusals`.
    #[serde(rename = "untold")]
    pub unavailable: Vec<String>,
}

/// Link to a port of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Preview {
    /// Link that requires neither key nor token.
    pub url: String,
    /// End of the validity.
    pub expires_at: Moment,
}
