//! Network rules of sandboxes.

use crate::egress_proxy::{EgressProxy, NewEgressProxy};
use crate::header_rule::{HeaderRule, NetworkRulesByHost, NewNetworkRules, rules_by_host};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum number of entries of one list.
pub const MAX_NETWORK_ENTRIES: usize = 256;
/// Maximum bandwidth limit in Mbit/s.
pub const MAX_EGRESS_MBPS: u32 = 100_000;

/// Pattern of names of private networks.
const NETWORK_NAME: &str = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$";
const OCTET: &str = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
/// Pattern of IPv6 addresses in the OpenAPI document. It is narrower than the daemon's parser, so
/// that requests generated from the document contain valid addresses only. The same holds for
/// [`NAME`].
const V6: &str = "::1|fd00::(/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?";
const NAME: &str =
    "(\\*\\.)?([a-z]([a-z0-9-]{0,30}[a-z0-9])?\\.){0,3}[a-z]([a-z0-9-]{0,30}[a-z0-9])?";
const PORT: &str = "(:([1-9][0-9]{0,3}|[1-5][0-9]{4}))?";
const HOST: &str = "^[a-z][a-z0-9]{0,30}(\\.[a-z][a-z0-9]{0,30}){0,3}(:\\$\\{PORT\\})?$";
/// Pattern of [`HOST`] or an empty string, which removes the header rule in an update.
const HOST_OR_EMPTY: &str =
    "^([a-z][a-z0-9]{0,30}(\\.[a-z][a-z0-9]{0,30}){0,3}(:\\$\\{PORT\\})?)?$";

fn v4(prefix: &str) -> String {
    format!("({OCTET}\\.){{3}}{OCTET}{prefix}")
}

fn cidr() -> String {
    v4("(/(3[0-2]|[12]?[0-9]))?")
}

fn allowed() -> String {
    format!("^({}|{V6}|{NAME}{PORT})$", cidr())
}

fn denied() -> String {
    format!("^({}|{V6})$", cidr())
}

fn server() -> String {
    format!("^({}|::1)$", v4(""))
}

/// Network rules of a new sandbox. Unknown fields are rejected, because ignoring a restriction
/// would leave the sandbox open.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
#[schemars(rename = "NewNetwork")]
pub struct NetworkBody {
    /// CIDRs, addresses, names and `*.name` that the sandbox may reach. Takes precedence over
    /// `denyOut`. A name applies to ports 80 and 443, `name:port` to TCP connections to that port.
    #[schemars(length(max = MAX_NETWORK_ENTRIES), inner(regex(pattern = allowed())))]
    pub allow_out: Option<Vec<String>>,
    /// CIDRs and addresses that the sandbox may not reach.
    #[schemars(length(max = MAX_NETWORK_ENTRIES), inner(regex(pattern = denied())))]
    pub deny_out: Option<Vec<String>>,
    /// Addresses of name servers.
    #[schemars(length(max = MAX_NETWORK_ENTRIES), inner(regex(pattern = server())))]
    pub dns_servers: Option<Vec<String>>,
    /// Maximum bandwidth of outgoing traffic in Mbit/s.
    #[schemars(range(min = 1, max = MAX_EGRESS_MBPS))]
    pub egress_mbps: Option<u32>,
    /// SOCKS5 proxy through which all TCP connections leave. Other outgoing packets except DNS
    /// questions are rejected.
    pub egress_proxy: Option<NewEgressProxy>,
    /// Headers that the host adds to requests, by host.
    pub rules: Option<NewNetworkRules>,
    /// Private network to join. Its members are the sandboxes of the same API key that name it.
    /// They reach each other by name and address.
    #[schemars(regex(pattern = NETWORK_NAME))]
    pub join: Option<String>,
    /// Ports whose servers use TLS. The host decrypts requests of clients and encrypts them again
    /// for the server, whose certificate is not verified. Not the port of the agent, 49983.
    #[schemars(length(max = MAX_NETWORK_ENTRIES), inner(range(min = 1)))]
    pub https_ports: Option<Vec<u16>>,
    /// If false, the sandbox's ports require the traffic token.
    pub allow_public_traffic: Option<bool>,
    /// `Host` header that the sandbox's servers receive; `${PORT}` is the port.
    #[schemars(regex(pattern = HOST))]
    pub mask_request_host: Option<String>,
}

impl NetworkBody {
    /// Returns rules that only join a private network.
    #[must_use]
    pub fn joining(network: String) -> Self {
        Self {
            join: Some(network),
            ..Self::default()
        }
    }
}

/// New network rules of a sandbox. `PUT` clears absent egress rules; an absent
/// `allowPublicTraffic`, `maskRequestHost` or `httpsPorts` remains unchanged. `PATCH` changes no
/// absent field. Unknown fields are rejected.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct NetworkUpdate {
    /// Access to the internet. Absent or null allows it with `PUT`.
    #[serde(rename = "allow_internet_access")]
    pub allow_internet_access: Option<bool>,
    /// CIDRs, addresses, names and `*.name` that the sandbox may reach. Takes precedence over
    /// `denyOut`. A name applies to ports 80 and 443, `name:port` to TCP connections to that port.
    #[schemars(length(max = MAX_NETWORK_ENTRIES), inner(regex(pattern = allowed())))]
    pub allow_out: Option<Vec<String>>,
    /// CIDRs and addresses that the sandbox may not reach.
    #[schemars(length(max = MAX_NETWORK_ENTRIES), inner(regex(pattern = denied())))]
    pub deny_out: Option<Vec<String>>,
    /// Addresses of name servers.
    #[schemars(length(max = MAX_NETWORK_ENTRIES), inner(regex(pattern = server())))]
    pub dns_servers: Option<Vec<String>>,
    /// Maximum bandwidth of outgoing traffic in Mbit/s.
    #[schemars(range(min = 1, max = MAX_EGRESS_MBPS))]
    pub egress_mbps: Option<u32>,
    /// SOCKS5 proxy through which all TCP connections leave. Other outgoing packets except DNS
    /// questions are rejected.
    pub egress_proxy: Option<NewEgressProxy>,
    /// Headers that the host adds to requests, by host.
    pub rules: Option<NewNetworkRules>,
    /// Ports whose servers use TLS. An empty list means that no server uses TLS.
    #[schemars(length(max = MAX_NETWORK_ENTRIES), inner(range(min = 1)))]
    pub https_ports: Option<Vec<u16>>,
    /// If false, the sandbox's ports require the traffic token.
    pub allow_public_traffic: Option<bool>,
    /// `Host` header that the sandbox's servers receive; `${PORT}` is the port. An empty string
    /// removes the header rule.
    #[schemars(regex(pattern = HOST_OR_EMPTY))]
    pub mask_request_host: Option<String>,
}

/// Network rules of a sandbox in the form of E2B.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxNetwork {
    /// CIDRs, addresses, names and `*.name` that the sandbox may reach. Takes precedence over
    /// `denyOut`.
    pub allow_out: Vec<String>,
    /// CIDRs and addresses that the sandbox may not reach.
    pub deny_out: Vec<String>,
    /// Addresses of name servers.
    pub dns_servers: Vec<String>,
    /// True if the sandbox's ports require no traffic token.
    pub allow_public_traffic: bool,
    /// Maximum bandwidth of outgoing traffic in Mbit/s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MAX_EGRESS_MBPS))]
    pub egress_mbps: Option<u32>,
    /// `Host` header that the sandbox's servers receive; `${PORT}` is the port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_request_host: Option<String>,
    /// Ports whose servers use TLS.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub https_ports: Vec<u16>,
    /// Headers that the host adds to requests, by host. Values without a reference to a secret are
    /// shown as `***`.
    #[serde(default, skip_serializing_if = "NetworkRulesByHost::is_empty")]
    pub rules: NetworkRulesByHost,
    /// SOCKS5 proxy through which all TCP connections leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_proxy: Option<EgressProxy>,
    /// Private network that the sandbox has joined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub join: Option<String>,
    /// Address of the sandbox in its private network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}

impl From<&NetworkSettings> for SandboxNetwork {
    fn from(settings: &NetworkSettings) -> Self {
        Self {
            allow_out: settings.allow_out.clone(),
            deny_out: settings.deny_out.clone(),
            dns_servers: settings.dns_servers.clone(),
            allow_public_traffic: !settings.restrict_traffic,
            egress_mbps: settings.egress_mbps,
            mask_request_host: settings.mask_request_host.clone(),
            https_ports: settings.https_ports.clone(),
            rules: rules_by_host(&settings.rules),
            egress_proxy: settings.egress_proxy.clone(),
            join: settings.join.clone(),
            address: settings.address.clone(),
        }
    }
}

/// Network rules in the details of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NetworkSettings {
    /// Access to the internet. Null allows it.
    pub allow_internet_access: Option<bool>,
    /// CIDRs, addresses, names and `*.name` that the sandbox may reach. Takes precedence over
    /// `deny_out`.
    pub allow_out: Vec<String>,
    /// CIDRs and addresses that the sandbox may not reach.
    pub deny_out: Vec<String>,
    /// Addresses of name servers.
    pub dns_servers: Vec<String>,
    /// Maximum bandwidth of outgoing traffic in Mbit/s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MAX_EGRESS_MBPS))]
    pub egress_mbps: Option<u32>,
    /// True if the sandbox's ports require the traffic token.
    pub restrict_traffic: bool,
    /// `Host` header that the sandbox's servers receive; `${PORT}` is the port.
    pub mask_request_host: Option<String>,
    /// Ports whose servers use TLS.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub https_ports: Vec<u16>,
    /// Headers that the host adds to requests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<HeaderRule>,
    /// SOCKS5 proxy through which all TCP connections leave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress_proxy: Option<EgressProxy>,
    /// Private network that the sandbox has joined.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub join: Option<String>,
    /// Address of the sandbox in its private network. It remains the same until the sandbox is
    /// killed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}
