//! Script of a slot's table: the rules of an egress policy in the language of `nft`.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! The *members* of a private network are the sandboxes that it connects.

use super::{EgressPolicy, is_ipv6};
use crate::connections;
use crate::guest::{ADDRESS, GATEWAY, GATEWAY6};
use crate::host_names::WEB_PORTS;
use crate::private_network;
use crate::slot_layout::{NETWORK_LINK, PROXY_PORTS, TAP, UPLINK};
use crate::special_ranges;
use ipnet::IpNet;
use jiffy_engine_api::RefusalReason;
use std::fmt::Write;

impl EgressPolicy {
    /// Returns the script of the slot's table, which replaces an existing table. The rules apply to
    /// every packet, so that a change also affects open connections. `max_connections` limits
    /// concurrent connections. Rejected packets are logged if `logs_refusals`. The chains `refuse`
    /// (denied by the rules) and `crowded` (too many connections) log a packet, and `turn_away`
    /// then rejects it.
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
        let (members, to_members) = self.member_chains(max_connections);
        let (out, back) = if self.egress_proxy.is_some() {
            // The daemon forwards all TCP connections, so that no packet leaves directly.
            ("    goto refuse\n".to_owned(), "    drop\n".to_owned())
        } else {
            (
                self.verdict("daddr", "goto refuse"),
                self.verdict("saddr", "drop"),
            )
        };
        // If the host has no IPv6 route, the slot has none either. Programs then get an error
        // immediately and do not wait for an answer to a dropped packet.
        let ipv6 = if self.ipv6() {
            ""
        } else {
            "    meta nfproto ipv6 drop\n"
        };
        // The chain `out` first rejects packets that belong to no connection and do not start one.
        // Without this rule, packets of open connections that the kernel no longer knows would pass
        // as new connections.
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
{members}  chain forward {{
    type filter hook forward priority filter; policy drop;
{ipv6}    # Packets without a connection would leave with the guest's address, untranslated.
    ct state invalid drop
    iifname "{TAP}" oifname "{UPLINK}" goto out
    iifname "{UPLINK}" oifname "{TAP}" ct state related accept
    iifname "{UPLINK}" oifname "{TAP}" ct state established goto back
{to_members}  }}
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

    /// Returns the chains for packets of the private network, and the rules of the chain `forward`
    /// that use them. Both are empty if the sandbox has joined no network.
    ///
    /// The source of the guest's packets is replaced by its address in the network, which is the
    /// only address of the link. Packets to this address lead to the guest, also its own packets.
    /// The rules contain no address of the sandbox, so that the tables of all members can be equal.
    /// Packets that belong to no connection and do not start one are answered with a reset, as
    /// after a rollback or a resume.
    fn member_chains(&self, max_connections: u32) -> (String, String) {
        if self.network.is_none() {
            return (String::new(), String::new());
        }
        let range = private_network::range();
        let verdict = |field, refuse: &str| {
            let rules = |nets: &[IpNet], verdict: &str| -> String {
                let rule = |matches| format!("    {matches}{verdict}\n");
                match_expressions(field, "", nets)
                    .into_iter()
                    .map(rule)
                    .collect()
            };
            rules(&self.allowed_members, "accept") + &rules(&self.denied_members, refuse)
        };
        let (to, from) = (verdict("daddr", "goto refuse"), verdict("saddr", "drop"));
        let chains = format!(
            r#"  chain to_members {{
    tcp flags & (fin | syn | rst | ack) != syn ct state new reject with tcp reset
    ct state new ct count over {max_connections} goto crowded
{to}    accept
  }}
  chain from_members {{
    tcp flags & (fin | syn | rst | ack) != syn ct state new reject with tcp reset
    ct state new ct count over {max_connections} drop
{from}    accept
  }}
  chain to_member_address {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname {{ "{TAP}", "{NETWORK_LINK}" }} ip daddr {range} fib daddr type local dnat ip to {ADDRESS}
  }}
  chain from_member_address {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{NETWORK_LINK}" masquerade
    iifname "{TAP}" oifname "{TAP}" masquerade
  }}
"#
        );
        let rules = format!(
            r#"    iifname "{TAP}" oifname "{NETWORK_LINK}" meta nfproto ipv4 goto to_members
    iifname "{NETWORK_LINK}" oifname "{TAP}" meta nfproto ipv4 goto from_members
    iifname "{TAP}" oifname "{TAP}" meta nfproto ipv4 ct status dnat accept
"#
        );
        (chains, rules)
    }

    /// Returns a chain that redirects connections to the proxy. It matches connections to ports 80
    /// and 443, and to other ports of names, that no address rule permits but a name may. It also
    /// matches connections to the control plane, whose name resolves to the gateway.
    fn proxy_chain(&self) -> String {
        // If the guest can reach every public address, names permit nothing more.
        let has_names = !self.names.is_empty() && !self.is_open();
        let has_headers = self.headers.is_some();
        let has_proxy = self.egress_proxy.is_some();
        if !has_names && self.control_plane.is_none() && !has_headers && !has_proxy {
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
        if !has_names && !has_headers && !has_proxy {
            return text + "  }\n";
        }
        if !self.ipv6() {
            text += "    meta nfproto ipv6 return\n";
        }
        if self.network.is_some() {
            // Connections to members do not leave the host.
            let _ = writeln!(text, "    ip daddr {} return", private_network::range());
        }
        // A connection to a special range is not redirected, and is then rejected by address. With
        // granted ranges, this rule is omitted, because a name may permit a granted address.
        if self.reach.granted.is_empty() {
            for special in match_expressions("daddr", "", special_ranges::ranges()) {
                let _ = writeln!(text, "    {special}return");
            }
        }
        if has_proxy {
            redirect_all(&mut text);
            return text + "  }\n";
        }
        // With headers, the name of each connection decides, also if an address rule permits it.
        if has_headers {
            redirects(&mut text, &WEB_PORTS);
        }
        let ports: Vec<u16> = if has_names {
            let web = WEB_PORTS.into_iter();
            let web = web.filter(|_| !has_headers && self.names.has_web_ports());
            web.chain(self.names.other_ports()).collect()
        } else {
            Vec::new()
        };
        if !ports.is_empty() {
            self.returns_by_address(&mut text);
            redirects(&mut text, &ports);
        }
        text + "  }\n"
    }

    /// Adds rules for connections whose address decides, so that no name needs to be known.
    fn returns_by_address(&self, text: &mut String) {
        let mut rule = |matches: String| *text += &format!("    {matches}return\n");
        match_expressions("daddr", "", &self.allowed)
            .into_iter()
            .for_each(&mut rule);
        if !self.internet {
            return;
        }
        // With internet access, names matter only for denied addresses: do not redirect others.
        for (six, name) in [(false, "ipv4"), (true, "ipv6")] {
            let denied = self.denied.iter().filter(|net| is_ipv6(net) == six);
            let denied: Vec<IpNet> = denied.copied().collect();
            match match_expressions("daddr", "!= ", &denied).pop() {
                Some(others) => rule(others),
                // No range of this version is denied.
                None => rule(format!("meta nfproto {name} ")),
            }
        }
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

/// Adds rules that redirect connections to `ports` to the proxy. Connections to ports other than 80
/// and 443 use the listener for TLS, and the proxy treats them by their original port.
fn redirects(text: &mut String, ports: &[u16]) {
    let [http, tls] = PROXY_PORTS;
    for port in ports {
        let own = if *port == 80 { http } else { tls };
        let _ = writeln!(text, "    tcp dport {port} redirect to :{own}");
    }
}

/// Adds rules that redirect all TCP connections to the proxy, except connections to the gateway,
/// where the DNS server is.
fn redirect_all(text: &mut String) {
    let [http, tls] = PROXY_PORTS;
    let _ = write!(
        text,
        "    ip daddr {GATEWAY} return\n    ip6 daddr {GATEWAY6} return\n    \
         tcp dport 80 redirect to :{http}\n    meta l4proto tcp redirect to :{tls}\n"
    );
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
