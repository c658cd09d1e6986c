//! What a sandbox may reach, checked and in the language of `nft`.

use crate::connections;
use crate::names::Names;
use crate::proxy::PORTS;
use crate::slot::{TAP, UPLINK};
use crate::special;
use crate::upstream::Upstreams;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use jiffy_engine::{NetworkRules, Refusal};
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

/// What the host has and its owner opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reach {
    /// What of private ranges sandboxes may reach.
    pub granted: Vec<IpNet>,
    /// Whether the host has a way into the IPv6 internet.
    pub version6: bool,
}

/// Rules that this host cannot keep.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// Neither address nor name.
    #[error("`allowOut`: `{0}` is neither an address, a CIDR, a name nor `*.name`")]
    Name(String),
    /// What only the host's owner can allow.
    #[error(
        "`allowOut`: `{0}` is in a private or special-purpose range, which the owner of this host has not opened to sandboxes (see `jiffy serve --allow-private`)"
    )]
    Private(String),
    /// There is no way there.
    #[error("`allowOut`: `{0}`: this host has no IPv6, so it cannot be reached")]
    Version6(String),
    /// Neither address nor CIDR.
    #[error("`{0}` is neither an address nor a CIDR")]
    Form(String),
    /// A name server that the rules do not allow.
    #[error("`dnsServers`: `{0}` cannot be reached under these rules; allow it first")]
    NameServer(IpAddr),
}

/// Rules that can be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    internet: bool,
    allowed: Vec<IpNet>,
    names: Names,
    denied: Vec<IpNet>,
    reach: Reach,
    name_servers: Vec<IpAddr>,
    /// Bytes of a second.
    pace: Option<u64>,
}

/// An address, a CIDR; everything is everything of both versions: the clients know it as `0.0.0.0/0` only.
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

fn version6(net: &IpNet) -> bool {
    matches!(net, IpNet::V6(_))
}

impl Policy {
    /// Checks `rules` on a host that has `reach`.
    pub fn new(rules: &NetworkRules, reach: &Reach) -> Result<Self, RulesError> {
        let special = special::ranges();
        let (mut allowed, mut names) = (Vec::new(), Names::default());
        for text in &rules.allow_out {
            let nets = match parse(text) {
                Some(nets) => nets,
                None if names.add(text) => continue,
                None => return Err(RulesError::Name(text.clone())),
            };
            // A wider one allows what is not private in it.
            let inside = |nets: &[IpNet], net| nets.iter().any(|n| n.contains(net));
            match nets.as_slice() {
                [net] if inside(special, net) && !inside(&reach.granted, net) => {
                    return Err(RulesError::Private(text.clone()));
                }
                [IpNet::V6(_)] if !reach.version6 => {
                    return Err(RulesError::Version6(text.clone()));
                }
                _ => allowed.extend(nets),
            }
        }
        let mut denied = Vec::new();
        for text in &rules.deny_out {
            denied.extend(parse(text).ok_or_else(|| RulesError::Form(text.clone()))?);
        }
        let policy = Self {
            internet: rules.internet,
            allowed: IpNet::aggregate(&allowed),
            names,
            denied: IpNet::aggregate(&denied),
            reach: Reach {
                granted: IpNet::aggregate(&reach.granted),
                ..*reach
            },
            name_servers: rules.dns_servers.clone(),
            pace: rules.egress_mbps.map(|mbps| u64::from(mbps) * 125_000),
        };
        let out_of_reach = |server: &&IpAddr| !policy.allows(**server);
        match policy.name_servers.iter().find(out_of_reach) {
            Some(server) => Err(RulesError::NameServer(*server)),
            None => Ok(policy),
        }
    }

    /// Whether packets to `address` pass.
    pub fn allows(&self, address: IpAddr) -> bool {
        self.permits_by_name(address)
            && (holds(&self.allowed, address) || (self.internet && !holds(&self.denied, address)))
    }

    /// Whether anything at all can be reached, so that names are of any use.
    pub(crate) fn reaches_anything(&self) -> bool {
        !self.allowed.is_empty() || !self.names.is_empty() || self.has_internet()
    }

    /// Whether what no list names can be reached, apart from some.
    fn has_internet(&self) -> bool {
        let all = |net: &IpNet| net.prefix_len() == 0;
        self.internet && !self.denied.iter().any(all)
    }

    /// Whether names decide about some connections.
    pub(crate) fn has_names(&self) -> bool {
        !self.names.is_empty()
    }

    /// Whether connections to `name` pass, wherever it leads.
    pub(crate) fn allows_name(&self, name: &str) -> bool {
        self.names.contain(name)
    }

    /// Whether a name that is allowed may lead to `address`: what is private stays private whatever it is called.
    pub(crate) fn permits_by_name(&self, address: IpAddr) -> bool {
        (address.is_ipv4() || self.version6())
            && (!special::contain(address) || holds(&self.reach.granted, address))
    }

    /// Whether anything can be reached over IPv6.
    pub(crate) fn version6(&self) -> bool {
        self.reach.version6
    }

    /// Whether `name` may be asked for. Where names are all that can be reached, other questions could only carry data out.
    pub(crate) fn answers(&self, name: &str) -> bool {
        let only_names = !self.names.is_empty() && self.allowed.is_empty() && !self.has_internet();
        self.reaches_anything() && (!only_names || self.allows_name(name))
    }

    /// The name servers that its questions go to.
    pub(crate) fn upstreams(&self, host: &Upstreams) -> Vec<SocketAddr> {
        match self.name_servers.as_slice() {
            [] => host.get(),
            own => own.iter().map(|&ip| (ip, 53).into()).collect(),
        }
    }

    /// The table of a slot that enforces it, in place of the one there is. Every packet is judged, also of connections that there are:
    /// so a change cuts them. `most` is that of connections at once; what is refused is told if `tells`.
    pub(crate) fn script(&self, most: u32, tells: bool) -> String {
        let tell = |why| match tells {
            true => format!("    {}\n", connections::statement(why)),
            false => String::new(),
        };
        let (rules, limit) = (tell(Refusal::Rules), tell(Refusal::Limit));
        let (by_name, pace) = (self.by_name(), self.pace());
        let (out, back) = (
            self.verdict("daddr", "goto refuse"),
            self.verdict("saddr", "drop"),
        );
        // There is no route either, which programs are told at once.
        let version6 = if self.version6() {
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
{version6}    # What belongs to no connection would leave under the guest's own address, which no host knows.
    ct state invalid drop
    iifname "{TAP}" oifname "{UPLINK}" goto out
    iifname "{UPLINK}" oifname "{TAP}" ct state related accept
    iifname "{UPLINK}" oifname "{TAP}" ct state established goto back
  }}
{by_name}{pace}}}
"#
        )
    }

    /// Drops what is more than it may send, also of what our proxy sends for it. The kernel lets a second's worth pass at once.
    fn pace(&self) -> String {
        let Some(pace) = self.pace else {
            return String::new();
        };
        format!(
            "  chain pace {{\n    type filter hook postrouting priority filter; policy accept;\n    \
             oifname \"{UPLINK}\" limit rate over {pace} bytes/second drop\n  }}\n"
        )
    }

    /// Leads connections that no address allows, and a name may, to our proxy.
    fn by_name(&self) -> String {
        if !self.has_names() || (self.internet && self.denied.is_empty()) {
            return String::new();
        }
        let mut text = format!(
            "  chain by_name {{\n    type nat hook prerouting priority dstnat; policy accept;\n    iifname != \"{TAP}\" return\n"
        );
        if !self.version6() {
            text += "    meta nfproto ipv6 return\n";
        }
        let mut rule = |matches: String| text += &format!("    {matches}return\n");
        // What is granted is private, too, and is judged by the lists like the rest.
        if self.reach.granted.is_empty() {
            among("daddr", "", special::ranges())
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
                    .filter(|n| version6(n) == six)
                    .copied()
                    .collect();
                match among("daddr", "!= ", &of).pop() {
                    Some(others) => rule(others),
                    // None of this version is denied.
                    None => rule(format!("meta nfproto {name} ")),
                }
            }
        }
        for (port, own) in [80, 443].into_iter().zip(PORTS) {
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
        for never in among(field, "", special::ranges()) {
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

/// What matches packets with one of `nets` (or, with `!= `, with another) in a field of their header: a rule's beginning for each version
/// of IP that `nets` has.
fn among(field: &str, not: &str, nets: &[IpNet]) -> Vec<String> {
    let of = |six: bool, family: &str| {
        let nets = nets.iter().filter(|net| version6(net) == six);
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
