//! A slot: a network namespace with a tap for one guest, and a way out through the host.
//!
//! ```text
//! guest eth0 -- tap0 [ namespace: guard, policy, NAT, DNS ] up0 -- jfTAG-N [ host: table, NAT ] -- the world
//! ```
//! Nothing passes until the host's end of the pair is switched on. A slot is used once: its namespace goes with everything in it - taps,
//! connections, neighbours, rules, counters - and the next has a new one.

use crate::device;
use crate::dns::Sockets;
use crate::error::NetError;
use crate::guest::{self, ADDRESS, GATEWAY, GATEWAY_MAC, MAC, MTU, PREFIX};
use crate::namespace;
use crate::policy::Policy;
use crate::program;
use crate::proxy::{Listeners, PORTS};
use ipnet::Ipv4Net;
use nix::unistd::{Pid, gettid};
use std::fs::{self, File};
use std::net::Ipv4Addr;

/// The guest's device in a namespace.
pub(crate) const TAP: &str = "tap0";
/// The way out of it.
pub(crate) const UPLINK: &str = "up0";

/// What the slots of one daemon have in common.
#[derive(Debug, Clone)]
pub(crate) struct Common {
    /// Six digits that no other data directory of this host has.
    pub tag: String,
    /// Addresses of the pairs.
    pub range: Ipv4Net,
    /// Largest packet on the way out.
    pub mtu: u32,
    /// Most connections of one sandbox.
    pub connections: u32,
    /// What a new slot is made with.
    pub usual: Policy,
}

impl Common {
    /// How names of namespaces and devices of this daemon begin.
    pub fn prefix(&self) -> String {
        prefix(&self.tag)
    }

    /// Namespace of slot `number`, and its device in the host.
    pub fn name(&self, number: u32) -> String {
        format!("{}{number}", self.prefix())
    }

    /// Addresses of the host's end and of the namespace's.
    fn pair(&self, number: u32) -> (Ipv4Addr, Ipv4Addr) {
        let host = u32::from(self.range.network()) + 2 * number;
        (host.into(), (host + 1).into())
    }
}

/// How names of namespaces and devices begin. At most 10 characters, so that a number of four digits fits a device's name.
pub(crate) fn prefix(tag: &str) -> String {
    format!("jf{tag}-")
}

/// A slot that nobody uses yet.
#[derive(Debug)]
pub(crate) struct Slot {
    pub number: u32,
    pub tap: File,
    pub dns: Sockets,
}

/// Makes slot `number`. If that fails there is nothing of it.
pub(crate) fn make(common: &Common, number: u32) -> Result<Slot, NetError> {
    // The thread, not the process: it is in the namespace where the host's end belongs.
    let (name, here) = (common.name(number), gettid());
    let (tap, dns) = namespace::create(&name, || inside(common, number, here))?;
    outside(common, number).inspect_err(|_| destroy(common, &[number]))?;
    Ok(Slot { number, tap, dns })
}

fn inside(common: &Common, number: u32, host_thread: Pid) -> Result<(File, Sockets), NetError> {
    for (path, value) in [
        // Guests have no IPv6: without it nothing in here speaks or listens to it.
        ("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1"),
        ("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"),
        ("/proc/sys/net/ipv4/ip_forward", "1"),
    ] {
        if let Err(e) = fs::write(path, value)
            && e.kind() != std::io::ErrorKind::NotFound
        {
            return Err(NetError::host(format!("setting {path}"))(e));
        }
    }
    let tap = device::tap(TAP).map_err(NetError::host("making a tap"))?;
    let (host, own) = common.pair(number);
    let peer = common.name(number);
    program::ip(&[
        "link set lo up".to_owned(),
        format!(
            "link set {TAP} address {} mtu {MTU} up",
            guest::text(GATEWAY_MAC)
        ),
        format!("addr add {GATEWAY}/{PREFIX} dev {TAP}"),
        // Nobody has to ask the guest where it is.
        format!(
            "neigh add {ADDRESS} lladdr {} dev {TAP} nud permanent",
            guest::text(MAC)
        ),
        format!(
            "link add {UPLINK} mtu {0} type veth peer name {peer} mtu {0} netns {host_thread}",
            common.mtu
        ),
        format!("addr add {own}/31 dev {UPLINK}"),
        format!("link set {UPLINK} up"),
        format!("route add default via {host} dev {UPLINK}"),
    ])?;
    program::nft(&(rules() + &common.usual.script(common.connections)))?;
    let dns = Sockets::open().map_err(NetError::host(format!("listening at {GATEWAY}:53")))?;
    Ok((tap, dns))
}

fn outside(common: &Common, number: u32) -> Result<(), NetError> {
    let (name, (host, _)) = (common.name(number), common.pair(number));
    program::ip(&[
        format!("link set {name} addrgenmode none"),
        format!("addr add {host}/31 dev {name}"),
    ])
}

/// Rules of every slot: only the guest's own addresses leave its card; of the namespace itself it reaches DNS and nothing else.
fn rules() -> String {
    let mac = guest::text(MAC);
    let [http, tls] = PORTS;
    format!(
        r#"table netdev jiffy_guard {{
  chain guest {{
    type filter hook ingress device "{TAP}" priority 0; policy drop;
    ether saddr != {mac} drop
    ether type arp arp saddr ether {mac} arp saddr ip {ADDRESS} accept
    ether type ip ip saddr {ADDRESS} accept
  }}
}}
table inet jiffy_slot {{
  chain input {{
    type filter hook input priority filter; policy drop;
    iifname "{TAP}" ip daddr {GATEWAY} meta l4proto {{ tcp, udp }} th dport 53 accept
    iifname "{TAP}" ip daddr {GATEWAY} icmp type echo-request accept
    iifname "{TAP}" ct status dnat tcp dport {{ {http}, {tls} }} accept
    iifname "{UPLINK}" ct state established accept
    iifname "{TAP}" meta l4proto tcp reject with tcp reset
    iifname "{TAP}" reject with icmpx type admin-prohibited
  }}
  chain clamp {{
    type filter hook forward priority mangle;
    tcp flags syn tcp option maxseg size set rt mtu
  }}
  chain leave {{
    type nat hook postrouting priority srcnat;
    oifname "{UPLINK}" masquerade
  }}
}}
"#
    )
}

/// Replaces what the sandbox in slot `number` may reach.
pub(crate) fn enforce(common: &Common, number: u32, policy: &Policy) -> Result<(), NetError> {
    let script = policy.script(common.connections);
    namespace::enter(&common.name(number), || program::nft(&script))
}

/// Opens the way out of slot `number`; only the host's end is switched, so nothing in the namespace is forgotten.
pub(crate) fn open(common: &Common, number: u32) -> Result<(), NetError> {
    let name = common.name(number);
    device::switch(&name, true).map_err(NetError::host(format!("switching {name} on")))
}

/// Sockets for the proxy of slot `number`.
pub(crate) fn listen_for_names(common: &Common, number: u32) -> Result<Listeners, NetError> {
    namespace::enter(&common.name(number), Listeners::open)
}

/// New sockets for the DNS of slot `number`, whose guest ran on without a daemon.
pub(crate) fn listen(common: &Common, number: u32) -> Result<Sockets, NetError> {
    namespace::enter(&common.name(number), || {
        Sockets::open().map_err(NetError::host(format!("listening at {GATEWAY}:53")))
    })
}

/// Removes slots.
pub(crate) fn destroy(common: &Common, numbers: &[u32]) {
    let mut devices = Vec::new();
    for &number in numbers {
        let name = common.name(number);
        namespace::remove(&name);
        // The kernel takes it away with its namespace, but later, and not while a guest's VMM holds the tap.
        if device::exists(&name) {
            devices.push(format!("link del {name}"));
        }
    }
    if !devices.is_empty() {
        // One that the kernel has taken away meanwhile is as it should be.
        let _ = program::run("ip", &["-force", "-batch", "-"], &devices.join("\n"));
    }
}
