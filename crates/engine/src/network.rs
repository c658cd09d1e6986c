//! What a sandbox may reach.

use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// What a sandbox may reach, as its maker says it. What the host forbids to all comes before; then `allow_out` wins over `deny_out`, and
/// that over `internet`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkRules {
    /// Whether what no list names may be reached.
    pub internet: bool,
    /// CIDR, address, name or `*.name`.
    pub allow_out: Vec<String>,
    /// CIDR or address.
    pub deny_out: Vec<String>,
    /// Name servers that its questions go to; none: the host's.
    pub dns_servers: Vec<IpAddr>,
    /// Most megabits of a second that it may send; none: as many as it can.
    #[serde(default)]
    pub egress_mbps: Option<u32>,
}

impl Default for NetworkRules {
    fn default() -> Self {
        Self {
            internet: true,
            allow_out: Vec::new(),
            deny_out: Vec::new(),
            dns_servers: Vec::new(),
            egress_mbps: None,
        }
    }
}
