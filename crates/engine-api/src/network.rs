//! [`NetworkRules`]: the egress rules of a sandbox, which the engine passes to the network.

use jiffy_api_types::{HeaderRule, IdentityTokens};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

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
    /// Proxy through which all TCP connections leave. `None` if they leave directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_proxy: Option<EgressProxy>,
    /// Membership in a private network. `None` if the sandbox has joined none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub membership: Option<NetworkMembership>,
}

/// Membership of a sandbox in a private network of its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkMembership {
    /// Name of the network. Networks of different owners are different networks.
    pub network: String,
    /// Address of the sandbox in the network, one of [`MEMBER_ADDRESSES`].
    pub address: Ipv4Addr,
    /// Id of the sandbox.
    pub id: String,
    /// Name of the sandbox, if it has one.
    pub name: Option<String>,
}

/// First address and prefix length of the range of private networks. All networks use the same
/// range. It is link-local, so that it hides no address that a sandbox may want to reach, and it
/// excludes the address of cloud metadata (169.254.169.254).
pub const PRIVATE_NETWORK_RANGE: (Ipv4Addr, u8) = (Ipv4Addr::new(169, 254, 64, 0), 18);

/// Addresses of members: the range without its first two addresses, of which the second is the
/// gateway, and without its broadcast address.
pub const MEMBER_ADDRESSES: RangeInclusive<u32> =
    Ipv4Addr::new(169, 254, 64, 2).to_bits()..=Ipv4Addr::new(169, 254, 127, 254).to_bits();

/// SOCKS5 proxy for the connections of a sandbox. It contains no secrets in plain text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressProxy {
    /// Address: `host:port`. An IPv6 address is in brackets.
    pub address: String,
    /// TLS settings of connections to the proxy. `None` if they are not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<EgressProxyTls>,
    /// User name and password, encrypted with the key of the host. `None` without authentication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealed_credentials: Option<String>,
}

/// TLS settings of connections to a proxy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressProxyTls {
    /// Name in the proxy's certificate. Defaults to the host of the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
    /// Authorities that may sign the certificate (PEM). Defaults to the authorities of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_certificates: Option<String>,
}

impl EgressProxy {
    /// Returns host and port of an address. `None` if it does not have the form `host:port`.
    #[must_use]
    pub fn split_address(address: &str) -> Option<(&str, u16)> {
        let (host, port) = address.rsplit_once(':')?;
        // Stricter than `parse`, which accepts a sign.
        let is_number = port.bytes().all(|b| b.is_ascii_digit());
        let port = port.parse().ok().filter(|port| is_number && *port > 0)?;
        let bracketed = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        match bracketed {
            Some(ip) => ip.parse::<Ipv6Addr>().ok().map(|_| (ip, port)),
            None if host.is_empty() || host.contains(':') => None,
            None => Some((host, port)),
        }
    }

    /// Returns the host of the address, without brackets.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        Self::split_address(&self.address).map(|(host, _)| host)
    }
}

/// Rules for headers that the host adds to requests of the sandbox. The host terminates TLS for
/// this, with certificates of an authority that the sandbox trusts. The rules contain no secrets in
/// plain text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderRules {
    /// Rules. The first rule that matches a request applies.
    pub rules: Vec<HeaderRule>,
    /// Certificate of the authority that the sandbox trusts (PEM).
    pub certificate: String,
    /// Private key of the authority, encrypted with the key of the host.
    pub sealed_key: String,
    /// Identity of the sandbox, of which headers may contain tokens. `None` without tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<Workload>,
}

/// Identity of a sandbox towards other services.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// Id of the sandbox.
    pub sandbox: String,
    /// API key that owns the sandbox. `None` if it belongs to the owner of the host.
    pub owner: Option<String>,
    /// Reference of the template that the sandbox descends from: `[owner/]name[:tag]`.
    pub template: String,
    /// Tokens by name.
    pub tokens: IdentityTokens,
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
            egress_proxy: None,
            membership: None,
        }
    }
}
