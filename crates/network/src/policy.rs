//! Egress rules of a sandbox, checked and in the language of `nft`.

use crate::connections;
use crate::guest::GATEWAY;
use crate::host_names::HostNames;
use crate::slot_layout::{PROXY_PORTS, TAP, UPLINK};
use crate::special_ranges;
use crate::upstream::Upstreams;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use jiffy_engine_api::{NetworkRules, RefusalReason};
use jiffy_proto::internal::is_api_host;
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

/// Reachability from the host, and the private ranges that its owner granted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostReachability {
    /// Private ranges that sandboxes may reach.
    pub granted: Vec<IpNet>,
    /// The host has a route into the IPv6 internet.
    pub ipv6: bool,
}

/// Rules that this host cannot enforce.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// Neither an address nor a name.
    #[error("`allowOut`: `{0}` is neither an address, a CIDR, a name nor `*.name`")]
    Name(String),
    /// A range that only the host's owner can allow.
    #[error(
        "`allowOut`: `{0}` is in a private or special-purpose range, which the owner of this host has not opened to sandboxes (see `jiffy serve --allow-private`)"
    )]
    Private(String),
    /// There is no IPv6 route.
    #[error("`allowOut`: `{0}`: this host has no IPv6, so it cannot be reached")]
    NoIpv6(String),
    /// Neither an address nor a CIDR.
    #[error("`{0}` is neither an address nor a CIDR")]
    Malformed(String),
    /// A name server in a private range, or of an IP version that the host does not have.
    #[error(
        "`dnsServers`: `{0}` is in a private or special-purpose range, which the owner of this host has not opened to sandboxes (see `jiffy serve --allow-private`), or this host has no route to its IP version; name a public server"
    )]
    NameServer(IpAddr),
}

/// Checked rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressPolicy {
    internet: bool,
    allowed: Vec<IpNet>,
    names: HostNames,
    denied: Vec<IpNet>,
    reach: HostReachability,
    name_servers: Vec<IpAddr>,
    /// Rate limit in bytes per second.
    pace: Option<u64>,
    /// API key as whose sandbox the control plane can be reached; none: it cannot.
    control_plane: Option<String>,
}

/// Parses an address or a CIDR; `0.0.0.0/0` stands for both IP versions, because clients know no
/// other form.
fn parse(text: &str) -> Option<Vec<IpNet>> {
    let net = text.parse::<IpNet>().ok();
    let net = net
        .or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))?
        .trunc();
    let all = [Ipv4Net::default().into(), Ipv6Net::default().into()];
    Some(if net.prefix_len() == 0 {
        all.to_vec()
    } else {
        vec![net]
    })
}

fn holds(nets: &[IpNet], address: IpAddr) -> bool {
    nets.iter().any(|net| net.contains(&address))
}

fn ipv6(net: &IpNet) -> bool {
    matches!(net, IpNet::V6(_))
}

impl EgressPolicy {
    /// Checks `rules` on a host that has `reach`.
    pub fn new(rules: &NetworkRules, reach: &HostReachability) -> Result<Self, RulesError> {
        let special = special_ranges::ranges();
        let (mut allowed, mut names) = (Vec::new(), HostNames::default());
        let mut control_plane = None;
        for text in &rules.allow_out {
            // Nothing else leads there: it is no name of the internet, and below no `*.name`.
            if is_api_host(text) {
                control_plane.clone_from(&rules.owner);
                continue;
            }
            let nets = match parse(text) {
                Some(nets) => nets,
                None if names.add(text) => continue,
                None => return Err(RulesError::Name(text.clone())),
            };
            // A wider range allows its public part.
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
            denied.extend(parse(text).ok_or_else(|| RulesError::Malformed(text.clone()))?);
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
            pace: rules.egress_mbps.map(|mbps| u64::from(mbps) * 125_000),
            control_plane,
        };
        // The host sends the questions, and only those for names that the rules allow: naming a
        // server permits it, also under rules that deny its address to the guest itself.
        let out_of_reach = |server: &&IpAddr| !policy.permits_by_name(**server);
        match policy.name_servers.iter().find(out_of_reach) {
            Some(server) => Err(RulesError::NameServer(*server)),
            None => Ok(policy),
        }
    }

    /// Returns true if packets to `address` pass.
    pub fn allows(&self, address: IpAddr) -> bool {
        self.permits_by_name(address)
            && (holds(&self.allowed, address) || (self.internet && !holds(&self.denied, address)))
    }

    /// Returns true if anything can be reached, so that names are of use.
    pub(crate) fn reaches_anything(&self) -> bool {
        !self.allowed.is_empty() || !self.names.is_empty() || self.has_internet()
    }

    /// Returns true if addresses outside of all lists can be reached.
    fn has_internet(&self) -> bool {
        let all = |net: &IpNet| net.prefix_len() == 0;
        self.internet && !self.denied.iter().any(all)
    }

    /// Returns true if names decide about some connections.
    pub(crate) fn has_names(&self) -> bool {
        !self.names.is_empty() || self.control_plane.is_some()
    }

    /// API key as whose sandbox the control plane can be reached; none: it cannot.
    pub(crate) fn control_plane(&self) -> Option<&str> {
        self.control_plane.as_deref()
    }

    /// Returns true if connections to `name` pass, regardless of its addresses.
    pub(crate) fn allows_name(&self, name: &str) -> bool {
        match is_api_host(name) {
            true => self.control_plane.is_some(),
            false => self.names.contains(name),
        }
    }

    /// Returns true if an allowed name may lead to `address`: private ranges stay private under any
    /// name.
    pub(crate) fn permits_by_name(&self, address: IpAddr) -> bool {
        (address.is_ipv4() || self.ipv6())
            && (!special_ranges::contains(address) || holds(&self.reach.granted, address))
    }

    /// Returns true if anything can be reached over IPv6.
    pub(crate) fn ipv6(&self) -> bool {
        self.reach.ipv6
    }

    /// Returns true if `name` may be resolved. If only names can be reached, other questions could
    /// only carry data out.
    pub(crate) fn answers(&self, name: &str) -> bool {
        let only_names = !self.names.is_empty() && self.allowed.is_empty() && !self.has_internet();
        self.reaches_anything() && (!only_names || self.allows_name(name))
    }

    /// Returns the name servers for its questions, which the host sends.
    pub(crate) fn upstreams(&self, host: &Upstreams) -> Vec<SocketAddr> {
        match self.name_servers.as_slice() {
            [] => host.get(),
            own => own.iter().map(|&ip| (ip, 53).into()).collect(),
        }
    }

    /// The slot's table that enforces it, replacing the present one. Every packet is judged, also
    /// of present connections: so a change cuts them. `most` limits connections at once; refusals
    /// are logged if `logs_refusals`.
    pub(crate) fn script(&self, most: u32, logs_refusals: bool) -> String {
        let tell = |why| match logs_refusals {
            true => format!("    {}\n", connections::statement(why)),
            false => String::new(),
        };
        let (rules, limit) = (tell(RefusalReason::Rules), tell(RefusalReason::Limit));
        let (by_name, pace) = (self.by_name(), self.pace());
        let (out, back) = (
            self.verdict("daddr", "goto refuse"),
            self.verdict("saddr", "drop"),
        );
        // There is no route either, so programs get an error at once.
        let ipv6 = if self.ipv6() {
            ""
        } else {
            "    meta nfproto ipv6 drop\n"
        };
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
    ct state new ct count over {most} goto crowded
{out}  }}
  chain back {{
{back}  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
{ipv6}    # What belongs to no connection would leave under the guest's own address, which no host knows.
    ct state invalid drop
    iifname "{TAP}" oifname "{UPLINK}" goto out
    iifname "{UPLINK}" oifname "{TAP}" ct state related accept
    iifname "{UPLINK}" oifname "{TAP}" ct state established goto back
  }}
{by_name}{pace}}}
"#
        )
    }

    /// Drops packets beyond the rate limit, also those of the proxy. The kernel passes one second's
    /// worth at once.
    fn pace(&self) -> String {
        let Some(pace) = self.pace else {
            return String::new();
        };
        format!(
            "  chain pace {{\n    type filter hook postrouting priority filter; policy accept;\n    \
             oifname \"{UPLINK}\" limit rate over {pace} bytes/second drop\n  }}\n"
        )
    }

    /// Redirects connections that no address allows, and a name may, to the proxy, and those to the
    /// control plane, whose name leads to the gateway's address.
    fn by_name(&self) -> String {
        let is_open = self.internet && self.denied.is_empty();
        let has_names = !self.names.is_empty() && !is_open;
        if !has_names && self.control_plane.is_none() {
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
        if !has_names {
            return text + "  }\n";
        }
        if !self.ipv6() {
            text += "    meta nfproto ipv6 return\n";
        }
        let mut rule = |matches: String| text += &format!("    {matches}return\n");
        // Granted ranges are private, too, and are judged by the lists like the rest.
        if self.reach.granted.is_empty() {
            among("daddr", "", special_ranges::ranges())
                .into_iter()
                .for_each(&mut rule);
        }
        among("daddr", "", &self.allowed)
            .into_iter()
            .for_each(&mut rule);
        if self.internet {
            for (six, name) in [(false, "ipv4"), (true, "ipv6")] {
                let of: Vec<IpNet> = self
                    .denied
                    .iter()
                    .filter(|n| ipv6(n) == six)
                    .copied()
                    .collect();
                match among("daddr", "!= ", &of).pop() {
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

    /// Rules that judge by a field of the IP header.
    fn verdict(&self, field: &str, refuse: &str) -> String {
        let mut text = String::new();
        let mut rule = |matches: &str, verdict: &str| {
            // Writing to a string does not fail.
            let _ = writeln!(text, "    {matches}{verdict}");
        };
        for never in among(field, "", special_ranges::ranges()) {
            let family = never.split(' ').next().unwrap_or_default();
            let granted = among(field, "!= ", &self.reach.granted);
            let except = granted
                .iter()
                .find(|rule| rule.starts_with(&format!("{family} ")));
            rule(&(never.clone() + except.map_or("", String::as_str)), refuse);
        }
        among(field, "", &self.allowed)
            .iter()
            .for_each(|nets| rule(nets, "accept"));
        among(field, "", &self.denied)
            .iter()
            .for_each(|nets| rule(nets, refuse));
        rule("", if self.internet { "accept" } else { refuse });
        text
    }
}

/// Matches packets with one of `nets` (or, with `!= `, with none of them) in a field of their
/// header: the start of a rule for each IP version in `nets`.
fn among(field: &str, not: &str, nets: &[IpNet]) -> Vec<String> {
    let of = |six: bool, family: &str| {
        let nets = nets.iter().filter(|net| ipv6(net) == six);
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
