//! Egress rules of a sandbox.

use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// Egress rules chosen by a sandbox's creator. The host's rules for all sandboxes come first; then
/// `allow_out` overrides `deny_out`, and that overrides `internet`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkRules {
    /// True if addresses in no list may be reached.
    pub internet: bool,
    /// CIDR, address, name or `*.name`.
    pub allow_out: Vec<String>,
    /// CIDR or address.
    pub deny_out: Vec<String>,
    /// Upstream name servers; none: the host's.
    pub dns_servers: Vec<IpAddr>,
    /// Limit of sent megabits per second; none: unlimited.
    #[serde(default)]
    pub egress_mbps: Option<u32>,
    /// API key that the sandbox belongs to; only with one it can reach the control plane, if
    /// `allow_out` names that.
    #[serde(default)]
    pub owner: Option<String>,
}

impl Default for NetworkRules {
    fn default() -> Self {
        Self {
            internet: true,
            allow_out: Vec::new(),
            deny_out: Vec::new(),
            dns_servers: Vec::new(),
            egress_mbps: None,
            owner: None,
        }
    }
}
