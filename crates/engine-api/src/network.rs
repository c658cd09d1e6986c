//! [`NetworkRules`]: the egress rules of a sandbox, which the engine passes to the network.

use jiffy_api_types::HeaderRule;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// Egress rules of a sandbox, chosen by its creator. The host's rules take precedence over them.
/// `allow_out` takes precedence over `deny_out`, which takes precedence over `internet`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkRules {
    /// True if addresses that match no list are allowed.
    pub internet: bool,
    /// Allowed destinations: CIDR blocks, addresses, names or `*.name`.
    pub allow_out: Vec<String>,
    /// Denied destinations: CIDR blocks or addresses.
    pub deny_out: Vec<String>,
    /// Upstream name servers. Defaults to the host's if empty.
    pub dns_servers: Vec<IpAddr>,
    /// Limit of the egress bandwidth, in megabits per second. `None` if unlimited.
    #[serde(default)]
    pub egress_mbps: Option<u32>,
    /// API key that owns the sandbox. The sandbox can connect to the control plane only if it has
    /// an owner and `allow_out` contains the control plane.
    #[serde(default)]
    pub owner: Option<String>,
    /// Headers that are added to requests to some hosts. `None` if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<HeaderRules>,
}

/// Rules for headers of requests. They contain no secrets in plain text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderRules {
    /// Rules. The first rule that matches a request applies.
    pub rules: Vec<HeaderRule>,
    /// Certificate of the authority that the sandbox trusts (PEM).
    pub certificate: String,
    /// Private key of the authority, encrypted with the key of the host.
    pub sealed_key: String,
}

impl HeaderRules {
    /// Returns whether a rule names `host`.
    #[must_use]
    pub fn names(&self, host: &str) -> bool {
        self.rules.iter().any(|rule| rule.names(host))
    }
}

impl Default for NetworkRules {
    fn default() -> Self {
        Self {
            // Sandboxes of callers that specify no rules have access to the internet.
            internet: true,
            allow_out: Vec::new(),
            deny_out: Vec::new(),
            dns_servers: Vec::new(),
            egress_mbps: None,
            owner: None,
            headers: None,
        }
    }
}
