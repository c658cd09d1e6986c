//! What whoever made a sandbox decided about it.

use jiffy_engine::NetworkRules;
use jiffy_proto::agent::SiteSettings;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What happens when a sandbox's time is over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// It is killed.
    #[default]
    Kill,
    /// It is paused.
    Pause,
}

/// What a sandbox may reach and who may reach it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Network {
    /// Whether the internet may be reached at all; none: yes.
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
    /// Whether its ports want the traffic token.
    pub restrict_traffic: bool,
    /// `Host` that its servers see; `${PORT}` is the port.
    pub mask_request_host: Option<String>,
}

impl Network {
    /// What it may reach.
    pub fn rules(&self) -> NetworkRules {
        NetworkRules {
            internet: self.allow_internet_access != Some(false),
            allow_out: self.allow_out.clone(),
            deny_out: self.deny_out.clone(),
            // Whoever wrote them down has checked them.
            dns_servers: self
                .dns_servers
                .iter()
                .filter_map(|s| s.parse().ok())
                .collect(),
            egress_mbps: self.egress_mbps,
        }
    }
}

/// What whoever made a sandbox decided about it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Terms {
    /// API key it was made with; none: the owner of this host.
    pub owner: Option<String>,
    /// Whatever its maker wants to find it by.
    pub metadata: BTreeMap<String, String>,
    /// Time it was last given, in seconds; none: it has no limit.
    pub timeout_s: Option<u64>,
    /// What happens when its time is over.
    pub on_timeout: OnTimeout,
    /// Whether traffic wakes it.
    pub auto_resume: bool,
    /// Whether its agent wants an access token.
    pub secure: bool,
    /// What it may reach and who may reach it.
    pub network: Network,
    /// Certificate authorities and proxy beside those of the host.
    #[serde(skip_serializing_if = "SiteSettings::is_empty")]
    pub site: SiteSettings,
}
