//! A slot: a network namespace with one guest's device, and an uplink through the host.
//!
//! ```text
//! guest eth0 -- tap0 [ namespace: guard, policy, NAT, DNS ] up0
//!     -- jfTAG-N [ host: table, NAT ] -- the world
//! ```
//! For a guest without a VMM `tap0` is one end of a veth pair; the other is its `eth0`, in a
//! namespace of its own (`veth.rs`).
//!
//! No packet passes until the host's end of the pair is switched on. A slot is used once: its
//! namespace is removed with everything in it - devices, connections, neighbours, rules, counters -
//! and the next slot has a new one.

use crate::connections::{self, statement};
use crate::device;
use crate::dns;
use crate::error::NetError;
use crate::forwarding;
use crate::guest::{
    self, ADDRESS, ADDRESS6, GATEWAY, GATEWAY_MAC, GATEWAY6, MAC, MTU, PREFIX, PREFIX6,
};
use crate::namespace;
use crate::policy::EgressPolicy;
use crate::program;
use crate::proxy::ProxyListeners;
use crate::slot_layout::{IPV6_SYSCTL_DIR, PROXY_PORTS, TAP, UPLINK, prefix, range6, set};
use crate::veth;
use ipnet::Ipv4Net;
use jiffy_engine::RefusalReason;
use nix::unistd::{Pid, gettid};
use std::collections::BTreeSet;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

/// MAC addresses of the uplink, in the namespace and in the host: neither has to resolve the
/// other's.
const PAIR_MAC: [[u8; 6]; 2] = [
    [0x02, 0x4a, 0x49, 0x46, 0x46, 0x03],
    [0x02, 0x4a, 0x49, 0x46, 0x46, 0x04],
];

/// Kind of a guest's network interface.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NicKind {
    /// A tap, whose descriptor a VMM holds.
    #[default]
    Tap,
    /// A veth pair: the guest's end is `eth0` in a network namespace of its own.
    Veth,
}

/// Configuration shared by the slots of one daemon.
#[derive(Debug, Clone)]
pub(crate) struct SlotConfig {
    /// Six digits that identify the data directory on this host.
    pub tag: String,
    /// Addresses of the pairs.
    pub range: Ipv4Net,
    /// Largest packet on the uplink.
    pub mtu: u32,
    /// Most connections of one sandbox.
    pub connections: u32,
    /// EgressPolicy of a new slot.
    pub usual: EgressPolicy,
    /// Its table logs refusals.
    pub logs_refusals: bool,
}

impl SlotConfig {
    /// Prefix of the names of this daemon's namespaces and devices.
    pub fn prefix(&self) -> String {
        prefix(&self.tag)
    }

    /// Namespace of slot `number`, and its device in the host.
    pub fn name(&self, number: u32) -> String {
        format!("{}{number}", self.prefix())
    }

    /// Namespace of the guest's own interface in slot `number`, if it has one.
    pub fn guest_name(&self, number: u32) -> String {
        format!("{}g", self.name(number))
    }

    /// Kind of interface of the existing slot `number`.
    pub fn nic(&self, number: u32) -> NicKind {
        match namespace::path(&self.guest_name(number)).exists() {
            true => NicKind::Veth,
            false => NicKind::Tap,
        }
    }

    /// Numbers of existing slots.
    pub fn numbers(&self) -> BTreeSet<u32> {
        let number = |name: &String| -> Option<u32> {
            let number = name.strip_prefix(&self.prefix())?;
            number.strip_suffix('g').unwrap_or(number).parse().ok()
        };
        let names = namespace::list(&self.prefix());
        names.iter().filter_map(number).collect()
    }

    /// The table that enforces `policy`.
    fn script(&self, policy: &EgressPolicy) -> String {
        policy.script(self.connections, self.logs_refusals)
    }

    /// Addresses of the host's end and of the namespace's.
    fn pair(&self, number: u32) -> (Ipv4Addr, Ipv4Addr) {
        let host = u32::from(self.range.network()) + 2 * number;
        (host.into(), (host + 1).into())
    }

    /// IPv6 addresses of the host's end and of the namespace's.
    fn pair6(&self, number: u32) -> (Ipv6Addr, Ipv6Addr) {
        let host = u128::from(range6(&self.tag).network()) + 2 * u128::from(number);
        (host.into(), (host + 1).into())
    }

    /// Addresses by which the host knows slots of these numbers.
    pub fn addresses(&self, numbers: &[u32]) -> Vec<IpAddr> {
        let v4 = numbers.iter().map(|&n| IpAddr::V4(self.pair(n).1));
        let v6 = numbers.iter().filter(|_| self.ipv6());
        v4.chain(v6.map(|&n| IpAddr::V6(self.pair6(n).1))).collect()
    }

    /// Returns true if slots have a route over IPv6.
    fn ipv6(&self) -> bool {
        self.usual.ipv6()
    }
}

/// An unused slot.
#[derive(Debug)]
pub(crate) struct Slot {
    pub number: u32,
    /// None: its guest has a namespace.
    pub tap: Option<File>,
    pub sockets: SlotSockets,
}

impl Slot {
    /// Kind of its guest's interface.
    pub fn nic(&self) -> NicKind {
        match self.tap {
            Some(_) => NicKind::Tap,
            None => NicKind::Veth,
        }
    }
}

/// The daemon's sockets in a slot.
#[derive(Debug)]
pub(crate) struct SlotSockets {
    /// SlotSockets for the guest's questions.
    pub dns: dns::DnsSockets,
    /// SlotSockets for the kernel's messages.
    pub connections: connections::ConnectionSockets,
}

impl SlotSockets {
    /// Opens them in the network namespace of this thread, whose table is in force.
    fn open() -> Result<Self, NetError> {
        let dns = dns::DnsSockets::open();
        Ok(Self {
            dns: dns.map_err(NetError::host(format!("listening at {GATEWAY}:53")))?,
            connections: connections::ConnectionSockets::open(),
        })
    }
}

/// Makes slot `number`. Removes it again on failure.
pub(crate) fn make(config: &SlotConfig, number: u32, nic: NicKind) -> Result<Slot, NetError> {
    // The thread, not the process: it is in the namespace of the host's end.
    let (name, here) = (config.name(number), gettid());
    let (tap, sockets) = namespace::create(&name, || make_inside(config, number, nic, here))?;
    outside(config, number).inspect_err(|_| destroy(config, &[number]))?;
    Ok(Slot {
        number,
        tap,
        sockets,
    })
}

fn make_inside(
    config: &SlotConfig,
    number: u32,
    nic: NicKind,
    host_thread: Pid,
) -> Result<(Option<File>, SlotSockets), NetError> {
    forward(config)?;
    match nic {
        NicKind::Tap => {
            let tap = device::tap(TAP).map_err(NetError::host("making a tap"))?;
            configure(config, number, host_thread)?;
            Ok((Some(tap), SlotSockets::open()?))
        }
        NicKind::Veth => {
            let guest = config.guest_name(number);
            veth::make(&guest, gettid())?;
            let configured = configure(config, number, host_thread)
                .and_then(|()| veth::configure(&guest))
                .and_then(|()| SlotSockets::open())
                .inspect_err(|_| {
                    namespace::remove(&guest);
                })?;
            Ok((None, configured))
        }
    }
}

/// Makes the namespace of this thread a router.
fn forward(config: &SlotConfig) -> Result<(), NetError> {
    set("/proc/sys/net/ipv4/ip_forward", "1")?;
    if Path::new(IPV6_SYSCTL_DIR).exists() {
        // The uplink has no IPv6 without a route; a namespace may start with any value.
        let off = if config.ipv6() { "0" } else { "1" };
        set(&format!("{IPV6_SYSCTL_DIR}/conf/default/disable_ipv6"), off)?;
    }
    if config.ipv6() {
        set(&format!("{IPV6_SYSCTL_DIR}/conf/all/forwarding"), "1")?;
    }
    Ok(())
}

/// Configures the guest's device and the uplink in the namespace of this thread.
fn configure(config: &SlotConfig, number: u32, host_thread: Pid) -> Result<(), NetError> {
    let knows6 = Path::new(IPV6_SYSCTL_DIR).exists();
    if knows6 {
        set(&format!("{IPV6_SYSCTL_DIR}/conf/{TAP}/disable_ipv6"), "0")?;
    }
    let (host, own) = config.pair(number);
    let peer = config.name(number);
    let [own_mac, host_mac] = PAIR_MAC.map(guest::text);
    let mut commands = vec![
        "link set lo up".to_owned(),
        format!(
            "link set {TAP} address {} mtu {MTU} addrgenmode none up",
            guest::text(GATEWAY_MAC)
        ),
        format!("addr add {GATEWAY}/{PREFIX} dev {TAP}"),
        // The guest's address needs no resolution.
        format!(
            "neigh add {ADDRESS} lladdr {} dev {TAP} nud permanent",
            guest::text(MAC)
        ),
        format!(
            "link add {UPLINK} address {own_mac} mtu {0} type veth peer name {peer} address {host_mac} mtu {0} netns {host_thread}",
            config.mtu
        ),
        format!("addr add {own}/31 dev {UPLINK}"),
        format!("link set {UPLINK} addrgenmode none up"),
        format!("route add default via {host} dev {UPLINK}"),
    ];
    if knows6 {
        // Also if the host has no IPv6 route: a guest that tries one gets an error at once.
        commands.extend([
            format!("addr add {GATEWAY6}/{PREFIX6} dev {TAP} nodad"),
            format!(
                "neigh add {ADDRESS6} lladdr {} dev {TAP} nud permanent",
                guest::text(MAC)
            ),
        ]);
    }
    if config.ipv6() {
        let (host, own) = config.pair6(number);
        commands.extend([
            format!("addr add {own}/127 dev {UPLINK} nodad"),
            format!("neigh add {host} lladdr {host_mac} dev {UPLINK} nud permanent"),
            format!("route add default via {host} dev {UPLINK}"),
        ]);
    }
    program::ip(&commands)?;
    program::nft(&(rules(config.logs_refusals, config.connections) + &config.script(&config.usual)))
}

fn outside(config: &SlotConfig, number: u32) -> Result<(), NetError> {
    let (name, (host, _)) = (config.name(number), config.pair(number));
    let mut commands = vec![
        format!("link set {name} addrgenmode none"),
        format!("addr add {host}/31 dev {name}"),
    ];
    if config.ipv6() {
        let (host, own) = config.pair6(number);
        let mac = guest::text(PAIR_MAC[0]);
        commands.extend([
            format!("addr add {host}/127 dev {name} nodad"),
            format!("neigh add {own} lladdr {mac} dev {name} nud permanent"),
        ]);
        forwarding::let_forward6(&name)?;
    }
    program::ip(&commands)
}

/// Rules of every slot: packets from the guest's interface must have its own addresses; of the
/// namespace itself they reach DNS only, and the kernel does not track that: every question would
/// be an entry in a table for a while.
fn rules(logs_refusals: bool, connections: u32) -> String {
    let mac = guest::text(MAC);
    let [http, tls] = PROXY_PORTS;
    let tell = match logs_refusals {
        true => format!(
            "    iifname \"{TAP}\" {}\n",
            statement(RefusalReason::Rules)
        ),
        false => String::new(),
    };
    format!(
        r#"table netdev jiffy_guard {{
  chain guest {{
    type filter hook ingress device "{TAP}" priority 0; policy drop;
    ether saddr != {mac} drop
    ether type arp arp saddr ether {mac} arp saddr ip {ADDRESS} accept
    ether type ip ip saddr {ADDRESS} accept
    ether type ip6 ip6 saddr {ADDRESS6} accept
  }}
}}
table inet jiffy_slot {{
  chain untracked {{
    type filter hook prerouting priority raw;
    iifname "{TAP}" ip daddr {GATEWAY} udp dport 53 notrack
    iifname "{TAP}" ip daddr {GATEWAY} icmp type echo-request notrack
  }}
  chain untracked_back {{
    type filter hook output priority raw;
    oifname "{TAP}" ip saddr {GATEWAY} udp sport 53 notrack
    oifname "{TAP}" ip saddr {GATEWAY} icmp type echo-reply notrack
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
    iifname "{TAP}" ct state new ct count over {connections} drop
    iifname "{TAP}" ip daddr {GATEWAY} meta l4proto {{ tcp, udp }} th dport 53 accept
    iifname "{TAP}" ip daddr {GATEWAY} icmp type echo-request accept
    iifname "{TAP}" icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
    iifname "{TAP}" ct status dnat tcp dport {{ {http}, {tls} }} accept
    iifname "{UPLINK}" ct state established accept
{tell}    iifname "{TAP}" meta l4proto tcp reject with tcp reset
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

/// Replaces the policy of the sandbox in slot `number`.
pub(crate) fn enforce(
    config: &SlotConfig,
    number: u32,
    policy: &EgressPolicy,
) -> Result<(), NetError> {
    let script = config.script(policy);
    namespace::enter(&config.name(number), || program::nft(&script))
}

/// Opens the uplink of slot `number`; only the host's end is switched, so the state in the
/// namespace stays.
pub(crate) fn open(config: &SlotConfig, number: u32) -> Result<(), NetError> {
    let name = config.name(number);
    device::switch(&name, true).map_err(NetError::host(format!("switching {name} on")))
}

/// SlotSockets for the proxy of slot `number`.
pub(crate) fn listen_for_names(
    config: &SlotConfig,
    number: u32,
) -> Result<ProxyListeners, NetError> {
    namespace::enter(&config.name(number), ProxyListeners::open)
}

/// Opens new sockets in slot `number`, whose guest ran on without a daemon.
pub(crate) fn listen(config: &SlotConfig, number: u32) -> Result<SlotSockets, NetError> {
    namespace::enter(&config.name(number), SlotSockets::open)
}

/// Removes remains of a crash in the way of the unused slot `number`: namespaces and a device. The
/// error names what cannot be removed.
pub(crate) fn clear(config: &SlotConfig, number: u32) -> Result<(), String> {
    let name = config.name(number);
    for namespace in [config.guest_name(number), name.clone()] {
        if !namespace::remove(&namespace) {
            return Err(namespace::path(&namespace).display().to_string());
        }
    }
    if device::exists(&name) {
        // The kernel may remove it at the same moment, with its namespace.
        let removed = program::ip(&[format!("link del {name}")]);
        if device::exists(&name) {
            let why = removed.err().map(|e| format!(" ({e})")).unwrap_or_default();
            return Err(format!("the device {name}{why}"));
        }
    }
    Ok(())
}

/// Removes slots.
pub(crate) fn destroy(config: &SlotConfig, numbers: &[u32]) {
    let mut devices = Vec::new();
    for &number in numbers {
        let name = config.name(number);
        namespace::remove(&name);
        // Last: by it the slot is recognised as one with a veth pair.
        namespace::remove(&config.guest_name(number));
        // The kernel removes it with its namespace, but later, and not while a guest's VMM holds
        // the tap.
        if device::exists(&name) {
            devices.push(format!("link del {name}"));
        }
    }
    if !devices.is_empty() {
        // A device that the kernel has removed meanwhile is no error.
        let _ = program::run("ip", &["-force", "-batch", "-"], &devices.join("\n"));
    }
}
