//! Egress policy of a sandbox: its validated rules, from which this module generates the `nft`
//! script of the slot's table. DNS server and proxy consult the same policy for names.

use crate::connections;
use crate::guest::GATEWAY;
use crate::host_names::HostNames;
use crate::slot_layout::{PROXY_PORTS, TAP, UPLINK};
use crate::special_ranges;
use crate::upstream::Upstreams;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use jiffy_engine_api::{HeaderRules, NetworkRules, RefusalReason};
use jiffy_proto::internal::is_api_host;
use std::fmt::Write;
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
}

/// Rules that this host cannot enforce.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// Neither an address nor a name.
    #[error("`allowOut`: `{0}` is neither an address, a CIDR, a name nor `*.name`")]
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
    denied: Vec<IpNet>,
    reach: HostReachability,
    /// Name servers for the guest's questions. Empty for the name servers of the host.
    name_servers: Vec<IpAddr>,
    /// Rate limit of packets that leave the slot, in bytes per second.
    bytes_per_second: Option<u64>,
    /// API key of the sandbox's owner for access to the control plane. `None` if access is denied.
    control_plane: Option<String>,
    /// Rules for headers of requests. `None` if there are none.
    headers: Option<Arc<HeaderRules>>,
    /// API key that owns the sandbox.
    owner: Option<String>,
}

/// List of rules.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RuleList {
    Allow,
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

fn is_ipv6(net: &IpNet) -> bool {
    matches!(net, IpNet::V6(_))
}

impl EgressPolicy {
    /// Validates `rules` on a host with `reach`.
    pub fn new(rules: &NetworkRules, reach: &HostReachability) -> Result<Self, RulesError> {
        if rules.headers.is_some() && !reach.adds_headers {
            return Err(RulesError::Headers);
        }
        let special = special_ranges::ranges();
        let (mut allowed, mut names) = (Vec::new(), HostNames::default());
        let mut control_plane = None;
        for text in &rules.allow_out {
            // The name of the control plane is not public and therefore not added to `names`. No
            // wildcard matches it (see `allows_name`).
            if is_api_host(text) {
                control_plane.clone_from(&rules.owner);
                continue;
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
        let policy = Self {
            internet: rules.internet,
            allowed: IpNet::aggregate(&allowed),
            names,
            denied: IpNet::aggregate(&denied),
            reach: HostReachability {
                granted: IpNet::aggregate(&reach.granted),
                ..*reach
            },
            name_servers: rules.dns_servers.clone(),
            // One Mbit/s is 125,000 bytes per second.
            bytes_per_second: rules.egress_mbps.map(|mbps| u64::from(mbps) * 125_000),
            control_plane,
            headers: rules.headers.clone().map(Arc::new),
            owner: rules.owner.clone(),
        };
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

    /// Returns true if names decide on some connections.
    pub(crate) fn has_names(&self) -> bool {
        !self.names.is_empty() || self.control_plane.is_some() || self.headers.is_some()
    }

    /// Returns true if requests to some hosts receive headers.
    pub(crate) fn has_headers(&self) -> bool {
        self.headers.is_some()
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
    pub(crate) fn permits_header_host(&self, host: &str, address: IpAddr) -> bool {
        self.allows(address) || (self.allows_name(host) && self.permits_by_name(address))
    }

    /// Returns the API key for access to the control plane. `None` if access is denied.
    pub(crate) fn control_plane(&self) -> Option<&str> {
        self.control_plane.as_deref()
    }

    /// Returns true if connections to `name` pass, regardless of its addresses.
    pub(crate) fn allows_name(&self, name: &str) -> bool {
        if is_api_host(name) {
            self.control_plane.is_some()
        } else {
            self.names.contains(name)
        }
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
        self.reaches_anything() && (!only_names || self.allows_name(name))
    }

    /// Returns the name servers for the guest's questions, which the host sends.
    pub(crate) fn upstreams(&self, host: &Upstreams) -> Vec<SocketAddr> {
        match self.name_servers.as_slice() {
            [] => host.get(),
            own => own.iter().map(|&ip| (ip, 53).into()).collect(),
        }
    }

    /// Returns the script of the slot's table, which replaces an existing table. The rules apply to
    /// every packet, so that a change also affects open connections. `max_connections` limits
    /// concurrent connections. Rejected packets are logged if `logs_refusals`.
    pub(crate) fn script(&self, max_connections: u32, logs_refusals: bool) -> String {
        let log = |why| {
            if logs_refusals {
                format!("    {}\n", connections::statement(why))
            } else {
                String::new()
            }
        };
        let (rules, limit) = (log(RefusalReason::Rules), log(RefusalReason::Limit));
        let (by_name, pace) = (self.proxy_chain(), self.rate_limit_chain());
        let (out, back) = (
            self.verdict("daddr", "goto refuse"),
            self.verdict("saddr", "drop"),
        );
        // If the host has no IPv6 route, the slot has none either. Programs then get an error
        // immediately and do not wait for an answer to a dropped packet.
        let ipv6 = if self.ipv6() {
            ""
        } else {
            "    meta nfproto ipv6 drop\n"
        };
        // The chain `out` first rejects packets that belong to no connection and do not start one.
        // Otherwise, open connections that the kernel no longer knows would pass as new ones.
        format!(
            r#"table inet jiffy
delete table inet jiffy
table inet jiffy {{
  chain turn_away {{
    meta l4proto tcp reject with tcp reset
    reject with icmpx type admin-prohibited
  }}
  chain refuse {{
{rules}    goto turn_away
  }}
  chain crowded {{
{limit}    goto turn_away
  }}
  chain out {{
    tcp flags & (fin | syn | rst | ack) != syn ct state new reject with tcp reset
    ct state new ct count over {max_connections} goto crowded
{out}  }}
  chain back {{
{back}  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
{ipv6}    # Packets without a connection would leave with the guest's address, untranslated.
    ct state invalid drop
    iifname "{TAP}" oifname "{UPLINK}" goto out
    iifname "{UPLINK}" oifname "{TAP}" ct state related accept
    iifname "{UPLINK}" oifname "{TAP}" ct state established goto back
  }}
{by_name}{pace}}}
"#
        )
    }

    /// Returns a chain that drops packets beyond the rate limit, including packets of the proxy.
    /// The kernel permits a burst of one second's bytes.
    fn rate_limit_chain(&self) -> String {
        let Some(bytes_per_second) = self.bytes_per_second else {
            return String::new();
        };
        format!(
            "  chain pace {{\n    type filter hook postrouting priority filter; policy accept;\n    \
             oifname \"{UPLINK}\" limit rate over {bytes_per_second} bytes/second drop\n  }}\n"
        )
    }

    /// Returns a chain that redirects connections to the proxy. It matches connections to ports 80
    /// and 443 that no address rule permits but a name may. It also matches connections to the
    /// control plane, whose name resolves to the gateway.
    fn proxy_chain(&self) -> String {
        // If the guest can reach every public address, names permit nothing more.
        let is_open = self.internet && self.denied.is_empty();
        let has_names = !self.names.is_empty() && !is_open;
        let has_headers = self.headers.is_some();
        if !has_names && self.control_plane.is_none() && !has_headers {
            return String::new();
        }
        let mut text = format!(
            "  chain by_name {{\n    type nat hook prerouting priority dstnat; policy accept;\n    iifname != \"{TAP}\" return\n"
        );
        let [http, _] = PROXY_PORTS;
        if self.control_plane.is_some() {
            let _ = writeln!(
                text,
                "    ip daddr {GATEWAY} tcp dport 80 redirect to :{http}"
            );
        }
        if !has_names && !has_headers {
            return text + "  }\n";
        }
        if !self.ipv6() {
            text += "    meta nfproto ipv6 return\n";
        }
        let mut rule = |matches: String| text += &format!("    {matches}return\n");
        // A connection to a special range is not redirected, and is then rejected by address. With
        // granted ranges, this rule is omitted, because a name may permit a granted address.
        if self.reach.granted.is_empty() {
            match_expressions("daddr", "", special_ranges::ranges())
                .into_iter()
                .for_each(&mut rule);
        }
        // The name of each connection determines whether its requests receive headers.
        if !has_headers {
            match_expressions("daddr", "", &self.allowed)
                .into_iter()
                .for_each(&mut rule);
        }
        // With internet access, names matter only for denied addresses: do not redirect others.
        if self.internet && !has_headers {
            for (six, name) in [(false, "ipv4"), (true, "ipv6")] {
                let of: Vec<IpNet> = self
                    .denied
                    .iter()
                    .filter(|n| is_ipv6(n) == six)
                    .copied()
                    .collect();
                match match_expressions("daddr", "!= ", &of).pop() {
                    Some(others) => rule(others),
                    // No range of this version is denied.
                    None => rule(format!("meta nfproto {name} ")),
                }
            }
        }
        for (port, own) in [80, 443].into_iter().zip(PROXY_PORTS) {
            let _ = writeln!(text, "    tcp dport {port} redirect to :{own}");
        }
        text + "  }\n"
    }

    /// Returns the rules that decide by a field of the IP header: packets of special ranges are
    /// rejected unless granted, then allowed addresses pass, then denied addresses are rejected.
    fn verdict(&self, field: &str, refuse: &str) -> String {
        let mut text = String::new();
        let mut rule = |matches: &str, verdict: &str| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "    {matches}{verdict}");
        };
        for never in match_expressions(field, "", special_ranges::ranges()) {
            // `never` starts with its IP version, `ip` or `ip6`. Exclude the granted ranges of this
            // version.
            let family = never.split(' ').next().unwrap_or_default();
            let granted = match_expressions(field, "!= ", &self.reach.granted);
            let except = granted
                .iter()
                .find(|rule| rule.starts_with(&format!("{family} ")));
            rule(&(never.clone() + except.map_or("", String::as_str)), refuse);
        }
        match_expressions(field, "", &self.allowed)
            .iter()
            .for_each(|nets| rule(nets, "accept"));
        match_expressions(field, "", &self.denied)
            .iter()
            .for_each(|nets| rule(nets, refuse));
        rule("", if self.internet { "accept" } else { refuse });
        text
    }
}

/// Returns the beginning of a rule for each IP version in `nets`. `field` is `daddr` or `saddr`.
/// The rule matches packets whose `field` is in `nets`. If `not` is `!= `, it matches the others.
fn match_expressions(field: &str, not: &str, nets: &[IpNet]) -> Vec<String> {
    let of = |six: bool, family: &str| {
        let nets = nets.iter().filter(|net| is_ipv6(net) == six);
        let nets: Vec<String> = nets.map(IpNet::to_string).collect();
        (!nets.is_empty()).then(|| format!("{family} {field} {not}{{ {} }} ", nets.join(", ")))
    };
    [of(false, "ip"), of(true, "ip6")]
        .into_iter()
        .flatten()
        .collect()
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
