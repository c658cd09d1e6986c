//! State of a fleet of hosts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
