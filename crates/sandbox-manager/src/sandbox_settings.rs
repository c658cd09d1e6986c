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
    /// API key with which the sandbox was created. `None` for the owner of this host.
    pub owner: Option<String>,
    /// Metadata chosen by the creator, for filters.
    pub metadata: BTreeMap<String, String>,
    /// Timeout that was set last, in seconds. `None` if there is no limit.
    pub timeout_s: Option<u64>,
    /// Action at the timeout.
    pub on_timeout: OnTimeout,
    /// True if traffic resumes the paused sandbox.
    pub auto_resume: bool,
    /// True if the agent requires an access token.
    pub secure: bool,
    /// Egress rules, and rules for traffic to the sandbox.
    pub network: NetworkSettings,
    /// Certificate authorities and proxy, in addition to the host's.
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
    /// Omits certificates, which are long, and the proxy, whose URL may contain a password.
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
