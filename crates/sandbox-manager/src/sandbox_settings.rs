//! Settings chosen by a sandbox's creator.

use jiffy_engine_api::NetworkRules;
use jiffy_proto::agent::SiteSettings;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Action at a sandbox's timeout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// It is killed.
    #[default]
    Kill,
    /// It is paused.
    Pause,
}

/// Addresses that a sandbox may reach, and rules for reaching it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NetworkSettings {
    /// Access to the internet at all; none: allowed.
    pub allow_internet_access: Option<bool>,
    /// CIDR, address, name or `*.name`; wins over `deny_out`.
    pub allow_out: Vec<String>,
    /// CIDR or address.
    pub deny_out: Vec<String>,
    /// Name servers.
    pub dns_servers: Vec<String>,
    /// Most megabits of a second that it may send.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress_mbps: Option<u32>,
    /// True if its ports want the traffic token.
    pub restrict_traffic: bool,
    /// `Host` that its servers see; `${PORT}` is the port.
    pub mask_request_host: Option<String>,
}

impl NetworkSettings {
    /// Returns the egress rules of a sandbox that belongs to `owner`.
    fn rules(&self, owner: Option<&str>) -> NetworkRules {
        NetworkRules {
            internet: self.allow_internet_access != Some(false),
            allow_out: self.allow_out.clone(),
            deny_out: self.deny_out.clone(),
            // The addresses were checked before they were written down.
            dns_servers: self
                .dns_servers
                .iter()
                .filter_map(|s| s.parse().ok())
                .collect(),
            egress_mbps: self.egress_mbps,
            owner: owner.map(str::to_owned),
        }
    }
}

/// Settings chosen by a sandbox's creator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SandboxSettings {
    /// API key it was made with; none: the owner of this host.
    pub owner: Option<String>,
    /// Whatever its maker wants to find it by.
    pub metadata: BTreeMap<String, String>,
    /// Time it was last given, in seconds; none: it has no limit.
    pub timeout_s: Option<u64>,
    /// Action at its timeout.
    pub on_timeout: OnTimeout,
    /// True if traffic wakes it.
    pub auto_resume: bool,
    /// True if its agent wants an access token.
    pub secure: bool,
    /// Addresses that it may reach, and rules for reaching it.
    pub network: NetworkSettings,
    /// Certificate authorities and proxy beside those of the host.
    #[serde(skip_serializing_if = "SiteSettings::is_empty")]
    pub site: SiteSettings,
}

impl SandboxSettings {
    /// Returns the egress rules.
    pub fn rules(&self) -> NetworkRules {
        self.network.rules(self.owner.as_deref())
    }
}
