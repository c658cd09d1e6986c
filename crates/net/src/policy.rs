//! What a sandbox may reach, checked and in the language of `nft`.

use crate::names::Names;
use crate::proxy::PORTS;
use crate::slot::{TAP, UPLINK};
use crate::upstream::Upstreams;
use ipnet::{IpNet, Ipv4Net};
use jiffy_engine::NetworkRules;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// What nobody reaches unless the host's owner says so: this network, private use, carriers' NAT, loopback, link-local with the metadata
/// services of clouds, protocol assignments, benchmarks, multicast, and what is reserved (RFC 6890).
const PRIVATE: [(Ipv4Addr, u8); 11] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];

/// Rules that this host cannot keep.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// Neither address nor name.
    #[error("`allowOut`: `{0}` is neither an address, a CIDR, a name nor `*.name`")]
    Name(String),
    /// What only the host's owner can allow.
    #[error(
        "`allowOut`: `{0}` is in a private range, which the owner of this host has not opened to sandboxes (see `jiffy serve --allow-private`)"
    )]
    Private(String),
    /// Guests have no such addresses.
    #[error("`allowOut`: `{0}`: sandboxes of this host have no IPv6, so it cannot be reached")]
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
    allowed: Vec<Ipv4Net>,
    names: Names,
    denied: Vec<Ipv4Net>,
    /// What the host's owner opened.
    granted: Vec<Ipv4Net>,
    name_servers: Vec<IpAddr>,
    /// Bytes of a second.
    pace: Option<u64>,
}

fn private() -> Vec<Ipv4Net> {
    let nets = PRIVATE.iter();
    nets.map(|&(address, length)| Ipv4Net::new_assert(address, length))
        .collect()
}

fn parse(text: &str) -> Option<IpNet> {
    let net = text.parse::<IpNet>().ok();
    net.or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

fn holds(nets: &[Ipv4Net], address: Ipv4Addr) -> bool {
    nets.iter().any(|net| net.contains(&address))
}

impl Policy {
    /// Checks `rules` on a host whose owner opened `granted` of what is private.
    pub fn new(rules: &NetworkRules, granted: &[Ipv4Net]) -> Result<Self, RulesError> {
        let private = private();
        let (mut allowed, mut names) = (Vec::new(), Names::default());
        for text in &rules.allow_out {
            let net = match parse(text) {
                Some(IpNet::V4(net)) => net.trunc(),
                Some(IpNet::V6(_)) => return Err(RulesError::Version6(text.clone())),
                None if names.add(text) => continue,
                None => return Err(RulesError::Name(text.clone())),
            };
            // A wider one allows what is not private in it.
            let inside = |nets: &[Ipv4Net]| nets.iter().any(|n| n.contains(&net));
            if inside(&private) && !inside(granted) {
                return Err(RulesError::Private(text.clone()));
            }
            allowed.push(net);
        }
        let mut denied = Vec::new();
        for text in &rules.deny_out {
            match parse(text) {
                Some(IpNet::V4(net)) => denied.push(net.trunc()),
                // There is nothing to deny.
                Some(IpNet::V6(_)) => {}
                None => return Err(RulesError::Form(text.clone())),
            }
        }
        let policy = Self {
            internet: rules.internet,
            allowed: Ipv4Net::aggregate(&allowed),
            names,
            denied: Ipv4Net::aggregate(&denied),
            granted: Ipv4Net::aggregate(&granted.to_vec()),
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
        let IpAddr::V4(address) = address else {
            return false;
        };
        if holds(&private(), address) && !holds(&self.granted, address) {
            return false;
        }
        holds(&self.allowed, address) || (self.internet && !holds(&self.denied, address))
    }

    /// Whether anything at all can be reached, so that names are of any use.
    pub(crate) fn reaches_anything(&self) -> bool {
        !self.allowed.is_empty() || !self.names.is_empty() || self.has_internet()
    }

    /// Whether what no list names can be reached, apart from some.
    fn has_internet(&self) -> bool {
        let all = |net: &Ipv4Net| net.prefix_len() == 0;
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
    pub(crate) fn permits_by_name(&self, address: Ipv4Addr) -> bool {
        !holds(&private(), address) || holds(&self.granted, address)
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
    /// so a change cuts them.
    pub(crate) fn script(&self, connections: u32) -> String {
        let (by_name, pace) = (self.by_name(), self.pace());
        let (out, back) = (
            self.verdict("daddr", "goto refuse"),
            self.verdict("saddr", "drop"),
        );
        format!(
            r#"table inet jiffy
delete table inet jiffy
table inet jiffy {{
  chain refuse {{
    meta l4proto tcp reject with tcp reset
    reject with icmpx type admin-prohibited
  }}
  chain out {{
    tcp flags & (fin | syn | rst | ack) != syn ct state new reject with tcp reset
    ct state new ct count over {connections} goto refuse
{out}  }}
  chain back {{
{back}  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    meta nfproto != ipv4 drop
    # What belongs to no connection would leave under the guest's own address, which no host knows.
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
        let mut rule = |nets: &[Ipv4Net], not: &str| {
            if !nets.is_empty() {
                // Writing to a string does not fail.
                let _ = writeln!(text, "    ip daddr {not}{{ {} }} return", join(nets));
            }
        };
        // What is granted is private, too, and is judged by the lists like the rest.
        let closed: Vec<Ipv4Net> = private()
            .into_iter()
            .filter(|_| self.granted.is_empty())
            .collect();
        rule(&closed, "");
        rule(&self.allowed, "");
        if self.internet {
            rule(&self.denied, "!= ");
        }
        for (port, own) in [80, 443].into_iter().zip(PORTS) {
            let _ = writeln!(text, "    tcp dport {port} redirect to :{own}");
        }
        text + "  }\n"
    }

    /// Rules that judge by a field of the IP header.
    fn verdict(&self, field: &str, refuse: &str) -> String {
        let mut text = String::new();
        let mut rule = |matches: String, verdict: &str| {
            // Writing to a string does not fail.
            let _ = writeln!(text, "    {matches}{verdict}");
        };
        let among = |nets: &[Ipv4Net]| format!("ip {field} {{ {} }} ", join(nets));
        let mut never = among(&private());
        if !self.granted.is_empty() {
            never += &format!("ip {field} != {{ {} }} ", join(&self.granted));
        }
        rule(never, refuse);
        if !self.allowed.is_empty() {
            rule(among(&self.allowed), "accept");
        }
        if !self.denied.is_empty() {
            rule(among(&self.denied), refuse);
        }
        rule(String::new(), if self.internet { "accept" } else { refuse });
        text
    }
}

fn join(nets: &[Ipv4Net]) -> String {
    let nets: Vec<String> = nets.iter().map(Ipv4Net::to_string).collect();
    nets.join(", ")
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
