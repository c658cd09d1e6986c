//! The host's own nftables table, which all packets of sandboxes pass. Also adds exceptions to
//! firewalls of the host that would drop forwarded packets.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. In rootless mode, the *router* is the network namespace to which
//! the slots are connected.
//!
//! A *claim* reserves a range of addresses of this host for one data directory.

use crate::NetError;
use crate::claim::RangeClaims;
use crate::connections;
use crate::conntrack::{self, ConntrackLimits};
use crate::device;
use crate::forwarding::{self, IpVersion};
use crate::host_addresses::HostAddresses;
use crate::namespace;
use crate::program;
use crate::slot_layout::{prefix, range6, table};
use ipnet::{Ipv4Net, Ipv6Net};
use jiffy_engine_api::RefusalReason;

/// Minimum MTU in bytes that is assumed for the uplink (the minimum of IPv6, RFC 8200 5).
const MIN_UPLINK_MTU: u32 = 1280;

/// Permits sandboxes with addresses in `range` to reach other hosts, but not the addresses of this
/// host. Replaces the rules of an earlier daemon. `tag` identifies the data directory. IPv6 is
/// included if the host has a route through `uplink6`. `own` has the host's addresses in rootless
/// mode, where the table is in a router's namespace and not in the host's.
pub(crate) fn set_up(
    claims: &RangeClaims,
    tag: &str,
    range: Ipv4Net,
    uplink6: Option<&str>,
    limits: ConntrackLimits,
    own: Option<&HostAddresses>,
) -> Result<(), NetError> {
    let range6 = uplink6.map(|_| range6(tag));
    // The table must be active before packets are forwarded.
    program::nft(&script(tag, range, range6, limits, own))?;
    // IPv4 forwarding has one setting for all devices, so the uplink is not needed.
    forwarding::start(claims, IpVersion::V4, "")?;
    if let (Some(uplink), Some(range)) = (uplink6, range6) {
        forwarding::start(claims, IpVersion::V6, uplink)?;
        // Drop packets to removed sandboxes instead of sending them to other hosts.
        program::ip(&[format!("route replace blackhole {range}")])?;
    }
    permit_in_firewalls(tag, true);
    Ok(())
}

/// Removes the namespaces, devices, rules and the claim of the data directory with this tag. Errors
/// are ignored: each object may already be removed.
pub(crate) fn tear_down(claims: &RangeClaims, tag: &str) {
    let prefix = prefix(tag);
    for name in namespace::list(&prefix) {
        namespace::remove(&name);
    }
    // Also remove devices whose namespace is no longer named.
    for name in device::names().unwrap_or_default() {
        if name.starts_with(&prefix) {
            let _ = program::ip(&[format!("link del {name}")]);
        }
    }
    permit_in_firewalls(tag, false);
    // Ignore the error: the route may not exist.
    let _ = program::ip(&[format!("route del blackhole {}", range6(tag))]);
    let table = table(tag);
    let _ = program::nft(&format!("table inet {table}\ndelete table inet {table}\n"));
    // Release the claim last, so that no other daemon takes the range while rules remain.
    claims.release(tag);
    namespace::unmount_if_empty();
    // Other daemons of this host still need forwarding.
    if claims.all().is_empty() {
        forwarding::stop(claims, IpVersion::V4);
        forwarding::stop(claims, IpVersion::V6);
    }
}

/// Returns the script of the host's table, which replaces an existing table.
fn script(
    tag: &str,
    range: Ipv4Net,
    range6: Option<Ipv6Net>,
    limits: ConntrackLimits,
    own: Option<&HostAddresses>,
) -> String {
    let sets = own.map_or_else(String::new, HostAddresses::sets);
    let own = own.map_or("", |_| HostAddresses::rules());
    let counted = limits.chains();
    let (timeouts, shorten) = conntrack::short_timeouts_if_supported();
    let (table, slots) = (table(tag), format!("\"{}*\"", prefix(tag)));
    let own6 = range6.map_or_else(
        || "meta nfproto ipv6 drop".to_owned(),
        |range| format!("ip6 saddr != {range} drop"),
    );
    let leaving6 = range6.map_or_else(String::new, |range| {
        format!("\n    ip6 saddr {range} oifname != {slots} masquerade")
    });
    // "jf*" matches the slots of all data directories. The chain `arriving` runs before DNAT,
    // because a published port of this host is a service of this host, too. Packets in state
    // invalid are dropped, because they would leave without address translation.
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
    iifname {slots} ct state invalid drop
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

/// Adds rules that accept the forwarded packets of sandboxes if `enable` is true, or removes these
/// rules. Docker drops forwarded packets unless a rule in its own chains accepts them, and a
/// separate table cannot override that. Therefore two rules are added to `DOCKER-USER`, or to
/// `FORWARD` if its policy is to drop.
fn permit_in_firewalls(tag: &str, enable: bool) {
    for program in ["iptables", "ip6tables"] {
        if program::find(program).is_some() {
            permit_in_firewall(program, tag, enable);
        }
    }
}

/// Like [`permit_in_firewalls`], with `program`, which is `iptables` or `ip6tables`.
fn permit_in_firewall(program: &'static str, tag: &str, enable: bool) {
    // Wait at most 5 s for the lock that other users of iptables hold.
    let tables = |args: &[&str]| program::run(program, &[&["-w", "5"][..], args].concat(), "");
    let devices = format!("{}+", prefix(tag));
    for chain in ["DOCKER-USER", "FORWARD"] {
        let Ok(listed) = tables(&["-S", chain]) else {
            continue;
        };
        for direction in ["-i", "-o"] {
            let rule = [chain, direction, &devices, "-j", "ACCEPT"];
            let with = |verb| [&[verb], &rule[..]].concat();
            let exists = listed.contains(&format!("{direction} {devices} -j ACCEPT"));
            let drops = chain == "DOCKER-USER" || listed.contains("-P FORWARD DROP");
            let verb = match (enable, exists) {
                (true, false) if drops => "-I",
                (false, true) => "-D",
                _ => continue,
            };
            if let Err(e) = tables(&with(verb)) {
                tracing::warn!(error = %e, "cannot change firewall rules: sandboxes may lack network access");
            }
        }
        // `DOCKER-USER` accepts the packets, so `FORWARD` needs no rules.
        if enable && chain == "DOCKER-USER" {
            return;
        }
    }
}

/// Returns true if rules can log rejected packets, as tested with `nft --check`, which changes
/// nothing.
pub(crate) fn logs_refusals() -> bool {
    let rule = connections::statement(RefusalReason::Rules);
    let script = format!("table inet jiffy_probe {{\n chain refuse {{\n {rule}\n }}\n}}\n");
    let check = program::run("nft", &["--check", "-f", "-"], &script);
    check
        .inspect_err(
            |e| tracing::warn!(error = %e, "cannot record denied connections of sandboxes"),
        )
        .is_ok()
}

/// Returns the MTU in bytes of the device of the host's default route, limited to 1280 to 1500.
/// Returns 1500 if the MTU is unknown.
pub(crate) fn uplink_mtu() -> u32 {
    let max = u32::from(crate::guest::MTU);
    let routes = program::run("ip", &["-4", "route", "show", "default"], "").unwrap_or_default();
    let device = routes.split_whitespace().skip_while(|w| *w != "dev").nth(1);
    let mtu = device.and_then(|device| device::mtu(device).ok());
    mtu.unwrap_or(max).clamp(MIN_UPLINK_MTU, max)
}
