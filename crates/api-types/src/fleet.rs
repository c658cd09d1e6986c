//! State of a fleet of hosts.
//!
//! A *shard* is a part of the fleet's sandboxes. Its *coordinator* is the host that registers
//! hosts, declares silent hosts dead and selects the hosts of new sandboxes. A *term* is the time
//! during which one host has this role. A *verdict* is the coordinator's decision that a host is
//! dead. An *epoch* of a host lasts from its registration until such a decision. The *records* of a
//! fleet are small objects in the object store or in etcd, by which the hosts agree. *Tables* are
//! the API keys and template names, which each host holds in memory. The *directory* lists the
//! sandboxes of all hosts, in the memory of the coordinator.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Fleet, as one host sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct FleetInfo {
    /// Id of the fleet.
    pub id: String,
    /// Host that answers.
    pub host: String,
    /// True if the host may resume stored sandboxes: its last heartbeat was acknowledged.
    pub has_authority: bool,
    /// True if the host has compared all of its sandboxes with the store since its registration.
    pub is_ready: bool,
    /// Coordinator. `null` if the host has not read the record of the fleet yet.
    pub coordinator: Option<String>,
    /// Number of the coordinator's term.
    pub term: Option<u64>,
    /// Number of shards.
    pub shards: u32,
    /// True if the coordinator has answered and knows the sandboxes of all hosts.
    pub is_directory_complete: bool,
    /// Silent hosts, while more than half of the hosts are silent.
    pub mass_silence: Option<MassSilence>,
    /// Records of the fleet. `null` if the host does not report them.
    pub records: Option<BackendStatus>,
    /// Store of the fleet.
    pub store: Option<BackendStatus>,
    /// Number of the tables that the host uses.
    pub tables: Option<u64>,
    /// Hosts that use other tables or did not answer, as `h2`.
    pub outdated_tables: Vec<String>,
    /// Lost hosts.
    pub losses: Vec<HostLoss>,
    /// Conditions that need an operator.
    pub warnings: Vec<String>,
    /// Hosts.
    pub nodes: Vec<FleetNode>,
}

/// Numbers of hosts while no host is declared dead, because too many are silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MassSilence {
    /// Silent hosts.
    pub silent: usize,
    /// All hosts.
    pub members: usize,
}

/// State of records or of the store, as one host sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackendStatus {
    /// Kind: `s3` or `etcd`.
    pub kind: String,
    /// Duration of a read, in milliseconds. `null` if the read has failed.
    pub latency_ms: Option<u64>,
    /// Failure of the read.
    pub error: Option<String>,
}

/// Sandboxes of a lost host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct HostLoss {
    /// Host.
    pub host: String,
    /// Time of the verdict, in milliseconds since 1970. `null` if it is unknown.
    pub since_ms: Option<u64>,
    /// Paused sandboxes that other hosts can resume.
    pub resumable: u64,
    /// Sandboxes that ran on the host, and are broken until it returns.
    pub broken: u64,
    /// Ids of paused sandboxes whose state is on the lost host only, at most 100.
    pub unstored: Vec<String>,
}

/// Host of a fleet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct FleetNode {
    /// Number of the host, as `h1`.
    pub id: String,
    /// State: `up`, `draining`, `dead` or `left`.
    pub state: String,
    /// Number of its latest registration.
    pub epoch: u64,
    /// Address for other hosts.
    pub address: String,
    /// Version of Jiffy.
    pub version: String,
    /// Labels, which creates may require.
    pub labels: BTreeMap<String, String>,
    /// Time since its last heartbeat, in milliseconds. `null` if the coordinator does not answer.
    pub heartbeat_age_ms: Option<u64>,
    /// Running sandboxes. `null` if the host did not answer within 1 s, like the following fields.
    pub running: Option<u64>,
    /// Paused sandboxes.
    pub paused: Option<u64>,
    /// Paused sandboxes whose state is on this host only.
    pub unstored: Option<u64>,
    /// Guests in warm pools.
    pub warm: Option<u64>,
    /// Memory for further sandboxes, in MiB.
    pub free_memory_mib: Option<u64>,
}

/// Hosts of a fleet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FleetNodes {
    /// Hosts, in the order of their numbers.
    pub nodes: Vec<FleetNode>,
}

/// Body of a drain.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DrainHost {
    /// Answer only after all sandboxes of the host have ended or can be resumed on other hosts.
    pub wait: bool,
    /// Pause running sandboxes, and store them. They resume on other hosts.
    pub force: bool,
}

/// Result of a command on a host of a fleet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct HostOperation {
    /// Host.
    pub host: String,
    /// State of the host after the command.
    pub state: String,
    /// Result for users.
    pub text: String,
    /// Sandboxes that still run on the host. Only for a drain.
    pub running: Option<u64>,
    /// Paused sandboxes of which the host has the only copy. Only for a drain.
    pub unstored: Option<u64>,
}

/// Result of the acceptance of restored records.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct AcceptedRestore {
    /// Hosts that had read newer records before, and now accept the present ones.
    pub accepted: Vec<String>,
    /// Hosts that did not answer: repeat the command.
    pub missing: Vec<String>,
    /// Result for users.
    pub text: String,
}

/// Explanation of the placement of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct FleetWhy {
    /// Id of the sandbox. `null` for a create that was rejected.
    pub sandbox: Option<String>,
    /// Host of the sandbox, if it is known.
    pub host: Option<String>,
    /// Recent decisions, the newest last.
    pub decisions: Vec<FleetDecision>,
    /// The explanation in words, one decision per line.
    pub text: String,
}

/// Decision about the host of a new sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct FleetDecision {
    /// Id of the decision. `null` for a decision without the coordinator.
    pub id: Option<String>,
    /// Time since the decision in milliseconds.
    pub age_ms: u64,
    /// Selected host. `null` if the create was rejected.
    pub host: Option<String>,
    /// Considered hosts and the reasons of their rejections.
    pub reason: String,
    /// Reason for which the selected host rejected the sandbox.
    pub rejected: Option<String>,
}
