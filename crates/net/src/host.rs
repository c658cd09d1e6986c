//! What the host itself needs: a table of its own in nftables, and a word with firewalls that drop what is forwarded.

use crate::NetError;
use crate::claim::Claims;
use crate::connections;
use crate::conntrack::{self, Limits};
use crate::device;
use crate::forwarding::{self, Version};
use crate::namespace;
use crate::own::OwnAddresses;
use crate::program;
use crate::slot::{prefix, range6};
use ipnet::{Ipv4Net, Ipv6Net};
use jiffy_engine::Refusal;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

/// Packets that fit any path.
const SMALLEST_USUAL_MTU: u32 = 1280;

pub(crate) fn table(tag: &str) -> String {
    format!("jiffy_{tag}")
}

/// Lets sandboxes with addresses in `range` out, and to nothing of this host. Replaces what an earlier daemon did. Over IPv6 too, if the
/// host has a way there, which is `uplink6`. Where the host is beyond a router,
/// `own` are its addresses.
pub(crate) fn set_up(
    claims: &Claims,
    tag: &str,
    range: Ipv4Net,
    uplink6: Option<&str>,
    limits: Limits,
    own: Option<&OwnAddresses>,
) -> Result<(), NetError> {
    let range6 = uplink6.map(|_| range6(tag));
    program::nft(&script(tag, range, range6, limits, own))?;
    forwarding::start(claims, Version::V4, "")?;
    if let (Some(uplink), Some(range)) = (uplink6, range6) {
        forwarding::start(claims, Version::V6, uplink)?;
        // Packets to a sandbox that is gone do not leave the host.
        program::ip(&[format!("route replace blackhole {range}")])?;
    }
    pass_firewall(tag, true);
    Ok(())
}

/// Undoes it, and removes namespaces that were left.
pub(crate) fn tear_down(claims: &Claims, tag: &str) {
    let prefix = prefix(tag);
    for name in namespace::list(&prefix) {
        namespace::remove(&name);
    }
    // Also those whose namespace has lost its name.
    for name in device::names().unwrap_or_default() {
        if name.starts_with(&prefix) {
            let _ = program::ip(&[format!("link del {name}")]);
        }
    }
    pass_firewall(tag, false);
    // Where there is none, there is none.
    let _ = program::ip(&[format!("route del blackhole {}", range6(tag))]);
    let table = table(tag);
    let _ = program::nft(&format!("table inet {table}\ndelete table inet {table}\n"));
    claims.give_up(tag);
    namespace::release();
    if claims.all().is_empty() {
        forwarding::stop(claims, Version::V4);
        forwarding::stop(claims, Version::V6);
    }
}

fn script(
    tag: &str,
    range: Ipv4Net,
    range6: Option<Ipv6Net>,
    limits: Limits,
    own: Option<&OwnAddresses>,
) -> String {
    let sets = own.map_or_else(String::new, OwnAddresses::sets);
    let own = own.map_or("", |_| OwnAddresses::rules());
    let counted = limits.chains();
    let (timeouts, shorten) = conntrack::ended_if_known();
    let (table, slots) = (table(tag), format!("\"{}*\"", prefix(tag)));
    let own6 = range6.map_or_else(
        || "meta nfproto ipv6 drop".to_owned(),
        |range| format!("ip6 saddr != {range} drop"),
    );
    let leaving6 = range6.map_or_else(String::new, |range| {
        format!("\n    ip6 saddr {range} oifname != {slots} masquerade")
    });
    // "jf*": of any data directory. Before anybody's DNAT: what is published at an address of this host is a service of it, too.
    format!(
        r#"table inet {table}
delete table inet {table}
table inet {table} {{
{sets}  chain refuse {{
    meta l4proto tcp reject with tcp reset
    reject with icmpx type admin-prohibited
  }}
{timeouts}{counted}  chain arriving {{
    type filter hook prerouting priority mangle; policy accept;
    iifname {slots} jump from_sandbox
  }}
  chain from_sandbox {{
    ip saddr != {range} drop
    {own6}
    ip daddr {range} goto refuse
    fib daddr type != unicast goto refuse
{own}{shorten}  }}
  chain here {{
    type filter hook input priority filter; policy accept;
    iifname {slots} drop
  }}
  chain passing {{
    type filter hook forward priority filter; policy accept;
    iifname {slots} oifname "jf*" drop
    iifname {slots} ct state new jump counted
    oifname {slots} ct state != {{ established, related }} drop
  }}
  chain leaving {{
    type nat hook postrouting priority srcnat;
    ip saddr {range} oifname != {slots} masquerade{leaving6}
  }}
}}
"#
    )
}

/// Docker drops what is forwarded unless a rule of its own chain says otherwise, and a table of ours cannot accept what another drops: so
/// two rules go where it leaves room for those of others, or into FORWARD where that drops.
fn pass_firewall(tag: &str, wanted: bool) {
    for program in ["iptables", "ip6tables"] {
        if program::find(program).is_some() {
            pass_tables(program, tag, wanted);
        }
    }
}

fn pass_tables(program: &'static str, tag: &str, wanted: bool) {
    let tables = |args: &[&str]| program::run(program, &[&["-w", "5"][..], args].concat(), "");
    let devices = format!("{}+", prefix(tag));
    for chain in ["DOCKER-USER", "FORWARD"] {
        let Ok(listed) = tables(&["-S", chain]) else {
            continue;
        };
        for direction in ["-i", "-o"] {
            let rule = [chain, direction, &devices, "-j", "ACCEPT"];
            let with = |verb| [&[verb], &rule[..]].concat();
            let there = listed.contains(&format!("{direction} {devices} -j ACCEPT"));
            let drops = chain == "DOCKER-USER" || listed.contains("-P FORWARD DROP");
            let verb = match (wanted, there) {
                (true, false) if drops => "-I",
                (false, true) => "-D",
                _ => continue,
            };
            if let Err(e) = tables(&with(verb)) {
                tracing::warn!("sandboxes may be cut off by the firewall: {e}");
            }
        }
        if wanted && chain == "DOCKER-USER" {
            return;
        }
    }
}

/// Whether `address` is one of this host's own: then it is what the host speaks to it under. Nothing is sent.
pub(crate) fn has(address: IpAddr) -> bool {
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let own = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((address, 9))?;
        socket.local_addr()
    });
    own.is_ok_and(|own| own.ip() == address)
}

/// Whether rules can tell which packets they refuse (`nft` asks the kernel, and changes nothing).
pub(crate) fn tells_refusals() -> bool {
    let rule = connections::statement(Refusal::Rules);
    let script = format!("table inet jiffy_probe {{\n chain refuse {{\n {rule}\n }}\n}}\n");
    let tells = program::run("nft", &["--check", "-f", "-"], &script);
    tells
        .inspect_err(|e| tracing::warn!("refused connections of sandboxes are not recorded: {e}"))
        .is_ok()
}

/// Largest packet that the host's default route carries, in bytes; at most 1500.
pub(crate) fn mtu_out() -> u32 {
    let usual = u32::from(crate::guest::MTU);
    let routes = program::run("ip", &["-4", "route", "show", "default"], "").unwrap_or_default();
    let device = routes.split_whitespace().skip_while(|w| *w != "dev").nth(1);
    let mtu = device.and_then(|device| device::mtu(device).ok());
    mtu.unwrap_or(usual).clamp(SMALLEST_USUAL_MTU, usual)
}
