//! A slot: a network namespace with one guest's device, and a way out through the host.
//!
//! ```text
//! guest eth0 -- tap0 [ namespace: guard, policy, NAT, DNS ] up0 -- jfTAG-N [ host: table, NAT ] -- the world
//! ```
//! For a guest without a VMM `tap0` is one end of a veth pair; the other is its `eth0`, in a namespace of its own (`veth.rs`).
//!
//! Nothing passes until the host's end of the pair is switched on. A slot is used once: its namespace goes with everything in it - devices,
//! connections, neighbours, rules, counters - and the next has a new one.

use crate::connections::{self, statement};
use crate::device;
use crate::dns;
use crate::error::NetError;
use crate::forwarding;
use crate::guest::{
    self, ADDRESS, ADDRESS6, GATEWAY, GATEWAY_MAC, GATEWAY6, MAC, MTU, PREFIX, PREFIX6,
};
use crate::namespace;
use crate::policy::Policy;
use crate::program;
use crate::proxy::{Listeners, PORTS};
use crate::veth;
use ipnet::{Ipv4Net, Ipv6Net};
use jiffy_engine::Refusal;
use nix::unistd::{Pid, gettid};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

/// The guest's device in a namespace.
pub(crate) const TAP: &str = "tap0";
/// The way out of it.
pub(crate) const UPLINK: &str = "up0";
/// Hardware addresses of the way out, in the namespace and in the host: neither has to ask for the other's.
const PAIR_MAC: [[u8; 6]; 2] = [
    [0x02, 0x4a, 0x49, 0x46, 0x46, 0x03],
    [0x02, 0x4a, 0x49, 0x46, 0x46, 0x04],
];
/// There if the kernel knows IPv6.
pub(crate) const KNOWS_V6: &str = "/proc/sys/net/ipv6";

/// What a guest is connected with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Card {
    /// A tap, whose descriptor a VMM holds.
    #[default]
    Tap,
    /// A veth pair: the guest's end is `eth0` in a network namespace of its own.
    Veth,
}

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
    /// Whether its table tells what it refuses.
    pub tells: bool,
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

    /// Namespace of the guest's own card in slot `number`, if that has one.
    pub fn guest_name(&self, number: u32) -> String {
        format!("{}g", self.name(number))
    }

    /// What the slot `number` that there is was made for.
    pub fn card(&self, number: u32) -> Card {
        match namespace::path(&self.guest_name(number)).exists() {
            true => Card::Veth,
            false => Card::Tap,
        }
    }

    /// Numbers of the slots that there are.
    pub fn numbers(&self) -> BTreeSet<u32> {
        let number = |name: &String| -> Option<u32> {
            let number = name.strip_prefix(&self.prefix())?;
            number.strip_suffix('g').unwrap_or(number).parse().ok()
        };
        let names = namespace::list(&self.prefix());
        names.iter().filter_map(number).collect()
    }

    /// The table that enforces `policy`.
    fn script(&self, policy: &Policy) -> String {
        policy.script(self.connections, self.tells)
    }

    /// Addresses of the host's end and of the namespace's.
    fn pair(&self, number: u32) -> (Ipv4Addr, Ipv4Addr) {
        let host = u32::from(self.range.network()) + 2 * number;
        (host.into(), (host + 1).into())
    }

    /// The same in IPv6.
    fn pair6(&self, number: u32) -> (Ipv6Addr, Ipv6Addr) {
        let host = u128::from(range6(&self.tag).network()) + 2 * u128::from(number);
        (host.into(), (host + 1).into())
    }

    /// What the host knows slots of these numbers by.
    pub fn addresses(&self, numbers: &[u32]) -> Vec<IpAddr> {
        let v4 = numbers.iter().map(|&n| IpAddr::V4(self.pair(n).1));
        let v6 = numbers.iter().filter(|_| self.version6());
        v4.chain(v6.map(|&n| IpAddr::V6(self.pair6(n).1))).collect()
    }

    /// Whether slots have a way out over IPv6.
    fn version6(&self) -> bool {
        self.usual.version6()
    }
}

/// Addresses of the pairs in IPv6: of the range that guests are in, by the data directory's tag.
pub(crate) fn range6(tag: &str) -> Ipv6Net {
    // It is six digits; the range is of this daemon alone for as long as the tag is.
    let tag = u128::from_str_radix(tag, 16).unwrap_or(0) & 0xff_ffff;
    let network = u128::from(ADDRESS6) >> 80 << 80;
    Ipv6Net::new_assert((network | tag << 56 | 1 << 32).into(), 112)
}

/// How names of namespaces and devices begin. At most 10 characters, so that a number of four digits fits a device's name.
pub(crate) fn prefix(tag: &str) -> String {
    format!("jf{tag}-")
}

/// A slot that nobody uses yet.
#[derive(Debug)]
pub(crate) struct Slot {
    pub number: u32,
    /// None: its guest has a namespace.
    pub tap: Option<File>,
    pub sockets: Sockets,
}

impl Slot {
    /// What its guest is connected with.
    pub fn card(&self) -> Card {
        match self.tap {
            Some(_) => Card::Tap,
            None => Card::Veth,
        }
    }
}

/// Where the daemon listens in a slot.
#[derive(Debug)]
pub(crate) struct Sockets {
    /// What the guest asks.
    pub dns: dns::Sockets,
    /// What the kernel tells.
    pub connections: connections::Sockets,
}

impl Sockets {
    /// In the network namespace of this thread, whose table is in force.
    fn open() -> Result<Self, NetError> {
        let dns = dns::Sockets::open();
        Ok(Self {
            dns: dns.map_err(NetError::host(format!("listening at {GATEWAY}:53")))?,
            connections: connections::Sockets::open(),
        })
    }
}

/// Makes slot `number`. If that fails there is nothing of it.
pub(crate) fn make(common: &Common, number: u32, card: Card) -> Result<Slot, NetError> {
    // The thread, not the process: it is in the namespace where the host's end belongs.
    let (name, here) = (common.name(number), gettid());
    let (tap, sockets) = namespace::create(&name, || inside(common, number, card, here))?;
    outside(common, number).inspect_err(|_| destroy(common, &[number]))?;
    Ok(Slot {
        number,
        tap,
        sockets,
    })
}

pub(crate) fn set(path: &str, value: &str) -> Result<(), NetError> {
    fs::write(path, value).map_err(NetError::host(format!("setting {path}")))
}

fn inside(
    common: &Common,
    number: u32,
    card: Card,
    host_thread: Pid,
) -> Result<(Option<File>, Sockets), NetError> {
    forward(common)?;
    match card {
        Card::Tap => {
            let tap = device::tap(TAP).map_err(NetError::host("making a tap"))?;
            configure(common, number, host_thread)?;
            Ok((Some(tap), Sockets::open()?))
        }
        Card::Veth => {
            let guest = common.guest_name(number);
            veth::make(&guest, gettid())?;
            let configured = configure(common, number, host_thread)
                .and_then(|()| veth::configure(&guest))
                .and_then(|()| Sockets::open())
                .inspect_err(|_| {
                    namespace::remove(&guest);
                })?;
            Ok((None, configured))
        }
    }
}

/// Makes the namespace of this thread a router.
fn forward(common: &Common) -> Result<(), NetError> {
    set("/proc/sys/net/ipv4/ip_forward", "1")?;
    if Path::new(KNOWS_V6).exists() {
        // The way out does not speak it where it leads nowhere; a namespace may begin with anything.
        let off = if common.version6() { "0" } else { "1" };
        set(&format!("{KNOWS_V6}/conf/default/disable_ipv6"), off)?;
    }
    if common.version6() {
        set(&format!("{KNOWS_V6}/conf/all/forwarding"), "1")?;
    }
    Ok(())
}

/// Configures the guest's device and the way out of the namespace of this thread.
fn configure(common: &Common, number: u32, host_thread: Pid) -> Result<(), NetError> {
    let knows6 = Path::new(KNOWS_V6).exists();
    if knows6 {
        set(&format!("{KNOWS_V6}/conf/{TAP}/disable_ipv6"), "0")?;
    }
    let (host, own) = common.pair(number);
    let peer = common.name(number);
    let [own_mac, host_mac] = PAIR_MAC.map(guest::text);
    let mut commands = vec![
        "link set lo up".to_owned(),
        format!(
            "link set {TAP} address {} mtu {MTU} addrgenmode none up",
            guest::text(GATEWAY_MAC)
        ),
        format!("addr add {GATEWAY}/{PREFIX} dev {TAP}"),
        // Nobody has to ask the guest where it is.
        format!(
            "neigh add {ADDRESS} lladdr {} dev {TAP} nud permanent",
            guest::text(MAC)
        ),
        format!(
            "link add {UPLINK} address {own_mac} mtu {0} type veth peer name {peer} address {host_mac} mtu {0} netns {host_thread}",
            common.mtu
        ),
        format!("addr add {own}/31 dev {UPLINK}"),
        format!("link set {UPLINK} addrgenmode none up"),
        format!("route add default via {host} dev {UPLINK}"),
    ];
    if knows6 {
        // Also where the host has no way out: a guest that asks for one is told so at once.
        commands.extend([
            format!("addr add {GATEWAY6}/{PREFIX6} dev {TAP} nodad"),
            format!(
                "neigh add {ADDRESS6} lladdr {} dev {TAP} nud permanent",
                guest::text(MAC)
            ),
        ]);
    }
    if common.version6() {
        let (host, own) = common.pair6(number);
        commands.extend([
            format!("addr add {own}/127 dev {UPLINK} nodad"),
            format!("neigh add {host} lladdr {host_mac} dev {UPLINK} nud permanent"),
            format!("route add default via {host} dev {UPLINK}"),
        ]);
    }
    program::ip(&commands)?;
    program::nft(&(rules(common.tells, common.connections) + &common.script(&common.usual)))
}

fn outside(common: &Common, number: u32) -> Result<(), NetError> {
    let (name, (host, _)) = (common.name(number), common.pair(number));
    let mut commands = vec![
        format!("link set {name} addrgenmode none"),
        format!("addr add {host}/31 dev {name}"),
    ];
    if common.version6() {
        let (host, own) = common.pair6(number);
        let mac = guest::text(PAIR_MAC[0]);
        commands.extend([
            format!("addr add {host}/127 dev {name} nodad"),
            format!("neigh add {own} lladdr {mac} dev {name} nud permanent"),
        ]);
        forwarding::let_forward6(&name)?;
    }
    program::ip(&commands)
}

/// Rules of every slot: only the guest's own addresses leave its card; of the namespace itself it reaches DNS and nothing else, and the
/// kernel does not track that: every question would be an entry in a table for a while.
fn rules(tells: bool, connections: u32) -> String {
    let mac = guest::text(MAC);
    let [http, tls] = PORTS;
    let tell = match tells {
        true => format!("    iifname \"{TAP}\" {}\n", statement(Refusal::Rules)),
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

/// Replaces what the sandbox in slot `number` may reach.
pub(crate) fn enforce(common: &Common, number: u32, policy: &Policy) -> Result<(), NetError> {
    let script = common.script(policy);
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

/// New sockets in slot `number`, whose guest ran on without a daemon.
pub(crate) fn listen(common: &Common, number: u32) -> Result<Sockets, NetError> {
    namespace::enter(&common.name(number), Sockets::open)
}

/// Removes what is in the way of slot `number`, which nobody has: namespaces and a device that a crash left. The error names what stays.
pub(crate) fn clear(common: &Common, number: u32) -> Result<(), String> {
    let name = common.name(number);
    for namespace in [common.guest_name(number), name.clone()] {
        if !namespace::remove(&namespace) {
            return Err(namespace::path(&namespace).display().to_string());
        }
    }
    if device::exists(&name) {
        // The kernel may take it away at the same moment, with its namespace.
        let removed = program::ip(&[format!("link del {name}")]);
        if device::exists(&name) {
            let why = removed.err().map(|e| format!(" ({e})")).unwrap_or_default();
            return Err(format!("the device {name}{why}"));
        }
    }
    Ok(())
}

/// Removes slots.
pub(crate) fn destroy(common: &Common, numbers: &[u32]) {
    let mut devices = Vec::new();
    for &number in numbers {
        let name = common.name(number);
        namespace::remove(&name);
        // Last: by it the slot is known as one with a veth pair.
        namespace::remove(&common.guest_name(number));
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
