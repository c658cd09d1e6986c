//! Egress policy of a sandbox: its validated rules, from which this module generates the `nft`
//! script of the slot's table. DNS server and proxy consult the same policy for names.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! A *private network* connects sandboxes of one owner, its *members*. *Membership* is the address
//! and name of a guest in such a network.

mod script;

use crate::host_names::{HostNames, split_port};
use crate::private_network::{self, NetworkId};
use crate::special_ranges;
use crate::upstream::Upstreams;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use jiffy_engine_api::{EgressProxy, HeaderRules, NetworkRules};
use jiffy_proto::internal::is_api_host;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Reachability from the host, and the private ranges that its operator permits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostReachability {
    /// Private ranges that sandboxes may reach.
    pub granted: Vec<IpNet>,
    /// True if the host has a default IPv6 route.
    pub ipv6: bool,
    /// True if the host can add headers to requests.
    pub adds_headers: bool,
    /// True if the host can connect through egress proxies.
    pub uses_proxies: bool,
}

/// Rules that this host cannot enforce.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// Neither an address nor a name.
    #[error(
        "`allowOut`: `{0}` is neither an address, a CIDR, a name nor `*.name`, the latter two optionally with a port"
    )]
    Name(String),
    /// A private range that only the host's operator can permit.
    #[error(
        "`allowOut`: `{0}` is in a private or special-purpose range, which the owner of this host has not opened to sandboxes (see `jiffy serve --allow-private`)"
    )]
    Private(String),
    /// The host has no IPv6 route.
    #[error("`allowOut`: `{0}` is unreachable: this host has no IPv6 route")]
    NoIpv6(String),
    /// The host cannot add headers to requests.
    #[error("`rules` is not supported: this host cannot add headers to requests of sandboxes")]
    Headers,
    /// The host cannot connect through egress proxies.
    #[error("`egressProxy` is not supported on this host")]
    Proxies,
    /// An egress proxy with an invalid address, in a private range, or with an IP version that the
    /// host cannot reach.
    #[error(
        "`egressProxy`: `{0}` is not `host:port`, or is in a private or special-purpose range, which the owner of this host has not opened to sandboxes (see `jiffy serve --allow-private`), or this host has no route to its IP version"
    )]
    Proxy(String),
    /// Neither an address nor a CIDR.
    #[error("`{0}` is neither an address nor a CIDR")]
    Malformed(String),
    /// A name server in a private range, or with an IP version that the host cannot reach.
    #[error(
        "`dnsServers`: `{0}` is in a private or special-purpose range, which the owner of this host has not opened to sandboxes (see `jiffy serve --allow-private`), or this host has no route to its IP version; name a public server"
    )]
    NameServer(IpAddr),
}

/// Validated rules of one sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressPolicy {
    /// True if addresses that match no list are allowed.
    internet: bool,
    /// Allowed ranges. They take precedence over `denied`.
    allowed: Vec<IpNet>,
    /// Names to which the proxy connects.
    names: HostNames,
    /// Denied ranges.
    denied: Vec<IpNet>,
    /// Ranges of `denied` other than all addresses. A name with a port does not permit them.
    denied_parts: Vec<IpNet>,
    /// Reachability from the host.
    reach: HostReachability,
    /// Name servers for the guest's questions. Empty for the name servers of the host.
    name_servers: Vec<IpAddr>,
    /// Rate limit of packets that leave the slot, in bytes per second.
    bytes_per_second: Option<u64>,
    /// API key of the sandbox's owner for access to the control plane. `None` if access is denied.
    control_plane: Option<String>,
    /// Rules for headers of requests. `None` if there are none.
    headers: Option<Arc<HeaderRules>>,
    /// Proxy through which all TCP connections leave. `None` if they leave directly.
    egress_proxy: Option<Arc<EgressProxy>>,
    /// API key that owns the sandbox.
    owner: Option<String>,
    /// Name of the private network that the sandbox has joined.
    network: Option<String>,
    /// Allowed addresses of other members. They take precedence over `denied_members`.
    allowed_members: Vec<IpNet>,
    /// Denied addresses of other members. All others are allowed.
    denied_members: Vec<IpNet>,
}

/// List of rules.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RuleList {
    /// The list `allowOut`.
    Allow,
    /// The list `denyOut`.
    Deny,
}

/// Parses an address or a CIDR of `list`. `0.0.0.0/0`, which clients use for "all addresses",
/// includes both IP versions. `::/0` includes both in `denyOut`, but permits IPv6 only.
fn parse(text: &str, list: RuleList) -> Option<Vec<IpNet>> {
    let net = text.parse::<IpNet>().ok();
    let net = net
        .or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))?
        .trunc();
    let is_all = net.prefix_len() == 0 && (!is_ipv6(&net) || list == RuleList::Deny);
    let all = [Ipv4Net::default().into(), Ipv6Net::default().into()];
    Some(if is_all { all.to_vec() } else { vec![net] })
}

/// Returns true if one of `nets` contains `address`.
fn any_contains(nets: &[IpNet], address: IpAddr) -> bool {
    nets.iter().any(|net| net.contains(&address))
}

/// Returns true for an IPv6 range.
fn is_ipv6(net: &IpNet) -> bool {
    matches!(net, IpNet::V6(_))
}

impl EgressPolicy {
    /// Validates `rules` on a host with `reach`.
    pub fn new(rules: &NetworkRules, reach: &HostReachability) -> Result<Self, RulesError> {
        if rules.headers.is_some() && !reach.adds_headers {
            return Err(RulesError::Headers);
        }
        if rules.egress_proxy.is_some() && !reach.uses_proxies {
            return Err(RulesError::Proxies);
        }
        let special = special_ranges::ranges();
        let (mut allowed, mut names) = (Vec::new(), HostNames::default());
        let mut control_plane = None;
        let mut allowed_members = Vec::new();
        for text in &rules.allow_out {
            // The name of the control plane is not public and therefore not added to `names`. No
            // wildcard matches it (see `allows_name`).
            if is_api_host(text) {
                control_plane.clone_from(&rules.owner);
                continue;
            }
            // The control plane has only one port.
            if split_port(text).is_some_and(|(name, port)| port.is_some() && is_api_host(name)) {
                return Err(RulesError::Name(text.clone()));
            }
            let nets = match parse(text, RuleList::Allow) {
                Some(nets) => nets,
                None if names.add(text) => continue,
                None => return Err(RulesError::Name(text.clone())),
            };
            // A range that is wider than a special range permits its public part only, so it needs
            // no grant.
            let inside = |nets: &[IpNet], net| nets.iter().any(|n| n.contains(net));
            match nets.as_slice() {
                // Members are separate from `allowed`: they permit neither other addresses nor
                // questions for other names.
                [net] if rules.membership.is_some() && private_network::contains(net) => {
                    allowed_members.push(*net);
                }
                [net] if inside(special, net) && !inside(&reach.granted, net) => {
                    return Err(RulesError::Private(text.clone()));
                }
                [IpNet::V6(_)] if !reach.ipv6 => {
                    return Err(RulesError::NoIpv6(text.clone()));
                }
                _ => allowed.extend(nets),
            }
        }
        let mut denied = Vec::new();
        for text in &rules.deny_out {
            let nets = parse(text, RuleList::Deny);
            denied.extend(nets.ok_or_else(|| RulesError::Malformed(text.clone()))?);
        }
        let mut denied_parts = denied.clone();
        denied_parts.retain(|net| net.prefix_len() > 0);
        // Like a name with a port, a network is more specific than the denial of all addresses.
        let mut denied_members = denied_parts.clone();
        denied_members.retain(|net| rules.membership.is_some() && private_network::overlaps(net));
        let policy = Self {
            internet: rules.internet,
            allowed: IpNet::aggregate(&allowed),
            names,
            denied: IpNet::aggregate(&denied),
            denied_parts: IpNet::aggregate(&denied_parts),
            reach: HostReachability {
                granted: IpNet::aggregate(&reach.granted),
                ..*reach
            },
            name_servers: rules.dns_servers.clone(),
            // One Mbit/s is 125,000 bytes per second.
            bytes_per_second: rules.egress_mbps.map(|mbps| u64::from(mbps) * 125_000),
            control_plane,
            headers: rules.headers.clone().map(Arc::new),
            egress_proxy: rules.egress_proxy.clone().map(Arc::new),
            owner: rules.owner.clone(),
            network: rules.membership.as_ref().map(|m| m.network.clone()),
            allowed_members: IpNet::aggregate(&allowed_members),
            denied_members: IpNet::aggregate(&denied_members),
        };
        if let Some(proxy) = &policy.egress_proxy {
            // The addresses of a name are checked for each connection.
            let address = proxy.host().map(str::parse::<IpAddr>);
            let is_invalid = |address: Result<IpAddr, _>| {
                address.is_ok_and(|address| !policy.permits_by_name(address))
            };
            if address.is_none_or(is_invalid) {
                return Err(RulesError::Proxy(proxy.address.clone()));
            }
        }
        // The host sends the questions, and only for names that the rules permit. Therefore a name
        // server in `dnsServers` is permitted even if the rules deny its address to the guest.
        let out_of_reach = |server: &&IpAddr| !policy.permits_by_name(**server);
        match policy.name_servers.iter().find(out_of_reach) {
            Some(server) => Err(RulesError::NameServer(*server)),
            None => Ok(policy),
        }
    }

    /// Returns true if packets to `address` pass.
    pub fn allows(&self, address: IpAddr) -> bool {
        self.permits_by_name(address)
            && (any_contains(&self.allowed, address)
                || (self.internet && !any_contains(&self.denied, address)))
    }

    /// Returns true if any address can be reached, so that resolving names is useful.
    pub(crate) fn reaches_anything(&self) -> bool {
        !self.allowed.is_empty() || !self.names.is_empty() || self.has_internet()
    }

    /// Returns true if addresses outside all lists can be reached.
    fn has_internet(&self) -> bool {
        let all = |net: &IpNet| net.prefix_len() == 0;
        self.internet && !self.denied.iter().any(all)
    }

    /// Returns true if the daemon forwards some connections.
    pub(crate) fn has_names(&self) -> bool {
        !self.names.is_empty()
            || self.control_plane.is_some()
            || self.headers.is_some()
            || self.egress_proxy.is_some()
    }

    /// Returns the proxy through which all TCP connections leave.
    pub(crate) fn egress_proxy(&self) -> Option<&Arc<EgressProxy>> {
        self.egress_proxy.as_ref()
    }

    /// Returns true if all public addresses can be reached.
    pub(crate) fn is_open(&self) -> bool {
        self.internet && self.denied.is_empty()
    }

    /// Returns true if requests to some hosts receive headers.
    pub(crate) fn has_headers(&self) -> bool {
        self.headers.is_some()
    }

    /// Returns the private network that the sandbox has joined.
    pub(crate) fn network(&self) -> Option<NetworkId> {
        let name = self.network.as_deref()?;
        Some(NetworkId::new(self.owner(), name))
    }

    /// Returns the API key that owns the sandbox.
    pub(crate) fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// Returns the rules for headers, if they name `host`.
    pub(crate) fn headers_for(&self, host: &str) -> Option<&Arc<HeaderRules>> {
        let rules = self.headers.as_ref()?;
        rules.names(host).then_some(rules)
    }

    /// Returns true if connections to `host`, whose requests receive headers, may lead to
    /// `address`.
    pub(crate) fn permits_header_host(&self, host: &str, address: SocketAddr) -> bool {
        let ip = address.ip();
        let by_name = || self.allows_name(host, address.port()) && self.permits_by_name(ip);
        self.allows(ip) || by_name()
    }

    /// Returns the API key for access to the control plane. `None` if access is denied.
    pub(crate) fn control_plane(&self) -> Option<&str> {
        self.control_plane.as_deref()
    }

    /// Returns true if connections to `port` of `name` pass, regardless of its addresses.
    pub(crate) fn allows_name(&self, name: &str, port: u16) -> bool {
        if is_api_host(name) {
            self.control_plane.is_some()
        } else {
            self.names.contains_at(name, port)
        }
    }

    /// Returns true if the addresses of `name` must be recorded, because connections are treated by
    /// the address that the guest chooses.
    pub(crate) fn records_addresses_of(&self, name: &str) -> bool {
        // An egress proxy receives names instead of addresses.
        let is_for_proxy = self.egress_proxy.is_some() && self.is_open();
        !is_api_host(name) && (is_for_proxy || self.names.contains_beside_web(name))
    }

    /// Returns true if connections to `port` pass by the name that was resolved to their address.
    pub(crate) fn has_resolved_port(&self, port: u16) -> bool {
        self.names.other_ports().contains(&port)
    }

    /// Returns true if a connection to `address`, an address of `name`, passes by that name.
    pub(crate) fn permits_resolved(&self, name: &str, address: SocketAddr) -> bool {
        !is_api_host(name)
            && self.names.contains_at(name, address.port())
            && self.permits_by_name(address.ip())
            && !any_contains(&self.denied_parts, address.ip())
    }

    /// Returns true if a permitted name may resolve to `address`. An address in a special range is
    /// denied under any name unless the operator granted the range.
    pub(crate) fn permits_by_name(&self, address: IpAddr) -> bool {
        (address.is_ipv4() || self.ipv6())
            && (!special_ranges::contains(address) || any_contains(&self.reach.granted, address))
    }

    /// Returns true if IPv6 addresses can be reached.
    pub(crate) fn ipv6(&self) -> bool {
        self.reach.ipv6
    }

    /// Returns true if `name` may be resolved. If only names can be reached, questions for other
    /// names could only exfiltrate data.
    pub(crate) fn may_resolve(&self, name: &str) -> bool {
        // With permitted addresses, any name is resolved: it may lead to one of them.
        let only_names = !self.names.is_empty() && self.allowed.is_empty() && !self.has_internet();
        self.reaches_anything() && (!only_names || self.names.contains(name))
    }

    /// Returns the name servers for the guest's questions, which the host sends.
    pub(crate) fn upstreams(&self, host: &Upstreams) -> Vec<SocketAddr> {
        match self.name_servers.as_slice() {
            [] => host.get(),
            own => own.iter().map(|&ip| (ip, 53).into()).collect(),
        }
    }
}

#[cfg(test)]
mod egress_proxy_tests;
#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
