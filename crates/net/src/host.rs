//! What the host itself needs: a table of its own in nftables, forwarding, and a word with firewalls that drop what is forwarded.

use crate::NetError;
use crate::claim::Claims;
use crate::device;
use crate::namespace;
use crate::program;
use crate::slot::prefix;
use ipnet::Ipv4Net;
use std::fs;

const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";
/// Table that keeps a host that did not forward before from forwarding for others.
const NO_ROUTER: &str = "jiffy_no_router";
/// Packets that fit any path.
const SMALLEST_USUAL_MTU: u32 = 1280;

fn table(tag: &str) -> String {
    format!("jiffy_{tag}")
}

/// Lets sandboxes with addresses in `range` out, and to nothing of this host. Replaces what an earlier daemon did.
pub(crate) fn set_up(claims: &Claims, tag: &str, range: Ipv4Net) -> Result<(), NetError> {
    program::nft(&script(tag, range))?;
    forward(claims)?;
    pass_firewall(tag, true);
    Ok(())
}

/// Undoes it, and removes namespaces that were left.
pub(crate) fn tear_down(claims: &Claims, tag: &str) {
    for name in namespace::list(&prefix(tag)) {
        namespace::remove(&name);
        if device::exists(&name) {
            let _ = program::ip(&[format!("link del {name}")]);
        }
    }
    pass_firewall(tag, false);
    let table = table(tag);
    let _ = program::nft(&format!("table inet {table}\ndelete table inet {table}\n"));
    claims.give_up(tag);
    if claims.all().is_empty() {
        stop_forwarding(claims);
    }
}

fn script(tag: &str, range: Ipv4Net) -> String {
    let (table, slots) = (table(tag), format!("\"{}*\"", prefix(tag)));
    // "jf*": of any data directory. Before anybody's DNAT: what is published at an address of this host is a service of it, too.
    format!(
        r#"table inet {table}
delete table inet {table}
table inet {table} {{
  chain refuse {{
    meta l4proto tcp reject with tcp reset
    reject with icmpx type admin-prohibited
  }}
  chain arriving {{
    type filter hook prerouting priority mangle; policy accept;
    iifname {slots} jump from_sandbox
  }}
  chain from_sandbox {{
    ip saddr != {range} drop
    meta nfproto ipv6 drop
    ip daddr {range} goto refuse
    fib daddr type != unicast goto refuse
  }}
  chain here {{
    type filter hook input priority filter; policy accept;
    iifname {slots} drop
  }}
  chain passing {{
    type filter hook forward priority filter; policy accept;
    iifname {slots} oifname "jf*" drop
    oifname {slots} ct state != {{ established, related }} drop
  }}
  chain leaving {{
    type nat hook postrouting priority srcnat;
    ip saddr {range} oifname != {slots} masquerade
  }}
}}
"#
    )
}

/// Switches forwarding on. Where it was off, the devices there are now go on not to forward from one to another.
fn forward(claims: &Claims) -> Result<(), NetError> {
    let failed = || NetError::host(format!("setting {FORWARDING}"));
    if fs::read_to_string(FORWARDING).map_err(failed())?.trim() != "0" {
        return Ok(());
    }
    let devices = nix::net::if_::if_nameindex()
        .map_err(|e| NetError::host("listing network devices")(e.into()))?;
    let names: Vec<String> = devices
        .iter()
        .map(|d| d.name().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with("jf") && !name.contains('"'))
        .map(|name| format!("\"{name}\""))
        .collect();
    let names = names.join(", ");
    program::nft(&format!(
        r#"table inet {NO_ROUTER}
delete table inet {NO_ROUTER}
table inet {NO_ROUTER} {{
  chain passing {{
    type filter hook forward priority filter; policy accept;
    meta nfproto ipv4 iifname {{ {names} }} oifname {{ {names} }} drop
  }}
}}
"#
    ))?;
    fs::write(claims.file("forwarding"), "switched on").map_err(failed())?;
    fs::write(FORWARDING, "1").map_err(failed())?;
    tracing::info!("this host forwards IPv4 from now on, for sandboxes only (net.ipv4.ip_forward)");
    Ok(())
}

/// Switches it off again if we switched it on and nobody else came to rely on it: containers bring devices of their own.
fn stop_forwarding(claims: &Claims) {
    let note = claims.file("forwarding");
    if !note.exists() {
        return;
    }
    let known = program::run("nft", &["list", "table", "inet", NO_ROUTER], "").unwrap_or_default();
    let others = nix::net::if_::if_nameindex().is_ok_and(|devices| {
        devices.iter().any(|device| {
            let name = device.name().to_string_lossy().into_owned();
            // Devices of slots that are gone may still be on their way out.
            !name.starts_with("jf") && !known.contains(&format!("\"{name}\""))
        })
    });
    if others {
        // The table stays: without it the host would be a router for everybody.
        tracing::info!("forwarding stays on: devices came that may need it");
        return;
    }
    let off = fs::write(FORWARDING, "0");
    if let Err(e) = off {
        tracing::warn!("cannot set {FORWARDING} back to 0: {e}");
        return;
    }
    let _ = program::nft(&format!(
        "table inet {NO_ROUTER}\ndelete table inet {NO_ROUTER}\n"
    ));
    let _ = fs::remove_file(note);
}

/// Docker drops what is forwarded unless a rule of its own chain says otherwise, and a table of ours cannot accept what another drops: so
/// two rules go where it leaves room for those of others, or into FORWARD where that drops.
fn pass_firewall(tag: &str, wanted: bool) {
    if program::find("iptables").is_none() {
        return;
    }
    let iptables = |args: &[&str]| program::run("iptables", &[&["-w", "5"][..], args].concat(), "");
    let devices = format!("{}+", prefix(tag));
    for chain in ["DOCKER-USER", "FORWARD"] {
        let Ok(listed) = iptables(&["-S", chain]) else {
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
            if let Err(e) = iptables(&with(verb)) {
                tracing::warn!("sandboxes may be cut off by the firewall: {e}");
            }
        }
        if wanted && chain == "DOCKER-USER" {
            return;
        }
    }
}

/// Largest packet that the host's default route carries, in bytes; at most 1500.
pub(crate) fn mtu_out() -> u32 {
    let usual = u32::from(crate::guest::MTU);
    let routes = program::run("ip", &["-4", "route", "show", "default"], "").unwrap_or_default();
    let device = routes.split_whitespace().skip_while(|w| *w != "dev").nth(1);
    let mtu = device.and_then(|device| device::mtu(device).ok());
    mtu.unwrap_or(usual).clamp(SMALLEST_USUAL_MTU, usual)
}
