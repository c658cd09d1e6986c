//! Settings chosen by a sandbox's creator.

use jiffy_api_types::{NetworkSettings, OnTimeout, SandboxTerms};
use jiffy_engine_api::NetworkRules;
use jiffy_proto::agent::SiteSettings;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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
        let network = &self.network;
        // The addresses were checked before they were stored.
        let servers = network.dns_servers.iter().filter_map(|s| s.parse().ok());
        NetworkRules {
            internet: network.allow_internet_access != Some(false),
            allow_out: network.allow_out.clone(),
            deny_out: network.deny_out.clone(),
            dns_servers: servers.collect(),
            egress_mbps: network.egress_mbps,
            owner: self.owner.clone(),
        }
    }
}

impl From<SandboxSettings> for SandboxTerms {
    /// Leaves out certificates, which are long, and the proxy, whose URL may have a password.
    fn from(settings: SandboxSettings) -> Self {
        Self {
            owner: settings.owner,
            metadata: settings.metadata,
            timeout_s: settings.timeout_s,
            on_timeout: settings.on_timeout,
            auto_resume: settings.auto_resume,
            secure: settings.secure,
            network: settings.network,
        }
    }
}
