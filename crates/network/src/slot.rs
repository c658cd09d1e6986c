//! Slot: a network namespace with the device of one guest, and an uplink through the host.
//!
//! ```text
//! guest eth0 -- tap0 [ namespace: guard, policy, NAT, DNS ] up0
//!     -- jfTAG-N [ host: table, NAT ] -- the world
//! ```
//! For a guest without a VMM, `tap0` is one end of a veth pair. The other end is the guest's `eth0`
//! in a separate namespace (`veth.rs`).
//!
//! No packet passes until the host's end of the uplink is switched on. A slot is used once: its
//! namespace is removed with all its devices, connections, neighbours, rules and counters, and the
//! next slot has a new namespace.

use crate::connections;
use crate::device;
use crate::dns;
use crate::error::NetError;
use crate::forwarding;
use crate::guest::{ADDRESS, ADDRESS6, GATEWAY, GATEWAY_MAC, GATEWAY6, MAC, MTU, PREFIX, PREFIX6};
use crate::namespace;
use crate::policy::EgressPolicy;
use crate::policy_tables::PolicyTables;
use crate::proxy::ProxyListeners;
use crate::rtnetlink::{LOOPBACK_INDEX, LinkChange, RouteBatch, VethEnd};
use crate::slot_layout::{self, IPV6_SYSCTL_DIR, TAP, UPLINK, prefix, range6, set, supports_ipv6};
use crate::slot_rules::SlotRules;
use crate::used_versions::UsedVersions;
use crate::veth;
use ipnet::Ipv4Net;
use std::collections::BTreeSet;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// MAC addresses of the uplink's ends, in the namespace and in the host. They are fixed, so that
/// neither end has to resolve the other's address.
const PAIR_MAC: [[u8; 6]; 2] = [
    [0x02, 0x4a, 0x49, 0x46, 0x46, 0x03],
    [0x02, 0x4a, 0x49, 0x46, 0x46, 0x04],
];

/// Prefix lengths of the uplink's addresses.
const PAIR_PREFIX: u8 = 31;
const PAIR_PREFIX6: u8 = 127;

/// Kind of a guest's network interface.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NicKind {
    /// Tap whose descriptor a VMM holds.
    #[default]
    Tap,
    /// Veth pair: the guest's end is `eth0` in a separate network namespace.
    Veth,
}

/// Configuration shared by the slots of one daemon.
#[derive(Debug, Clone)]
pub(crate) struct SlotConfig {
    /// Six hexadecimal digits that identify the data directory on this host.
    pub tag: String,
    /// Addresses of the uplinks.
    pub range: Ipv4Net,
    /// MTU in bytes of the uplink.
    pub mtu: u32,
    /// Maximum number of concurrent connections of one sandbox.
    pub connections: u32,
    /// Policy of a new slot.
    pub default_policy: EgressPolicy,
    /// True if the tables of slots log rejected packets.
    pub logs_refusals: bool,
    /// Rules of a new slot.
    pub rules: Arc<SlotRules>,
    /// Recorded tables for later changes of a slot's policy.
    pub policies: Arc<PolicyTables>,
}

impl SlotConfig {
    /// Returns the prefix of the names of this daemon's namespaces and devices.
    pub fn prefix(&self) -> String {
        prefix(&self.tag)
    }

    /// Returns the name of slot `number`'s namespace and of its device in the host.
    pub fn name(&self, number: u32) -> String {
        format!("{}{number}", self.prefix())
    }

    /// Returns the name of the namespace of the guest's interface in slot `number`, if it has one.
    pub fn guest_name(&self, number: u32) -> String {
        format!("{}g", self.name(number))
    }

    /// Returns the kind of interface of the existing slot `number`.
    pub fn nic(&self, number: u32) -> NicKind {
        if namespace::path(&self.guest_name(number)).exists() {
            NicKind::Veth
        } else {
            NicKind::Tap
        }
    }

    /// Returns the numbers of existing slots.
    pub fn numbers(&self) -> BTreeSet<u32> {
        let number = |name: &String| -> Option<u32> {
            let number = name.strip_prefix(&self.prefix())?;
            number.strip_suffix('g').unwrap_or(number).parse().ok()
        };
        let names = namespace::list(&self.prefix());
        names.iter().filter_map(number).collect()
    }

    /// Returns whether two policies have the same table. They can differ in parts that the table
    /// does not contain: the owner, or names to which the proxy connects.
    pub fn has_same_table(&self, one: &EgressPolicy, other: &EgressPolicy) -> bool {
        one == other || self.script(one) == self.script(other)
    }

    /// Returns the script of the table that enforces `policy`.
    fn script(&self, policy: &EgressPolicy) -> String {
        policy.script(self.connections, self.logs_refusals)
    }

    /// Returns the addresses of the host's end and of the namespace's end.
    fn pair(&self, number: u32) -> (Ipv4Addr, Ipv4Addr) {
        let host = u32::from(self.range.network()) + 2 * number;
        (host.into(), (host + 1).into())
    }

    /// Returns the IPv6 addresses of the host's end and of the namespace's end.
    fn pair6(&self, number: u32) -> (Ipv6Addr, Ipv6Addr) {
        let host = u128::from(range6(&self.tag).network()) + 2 * u128::from(number);
        (host.into(), (host + 1).into())
    }

    /// Returns the addresses under which the host may have connections of these slots.
    pub fn used_addresses(&self, numbers: &[u32]) -> Vec<IpAddr> {
        let of_slot = |&number| {
            let used = namespace::enter(&self.name(number), || Ok(UsedVersions::here()));
            used.unwrap_or_default()
                .of(self.pair(number).1, self.pair6(number).1)
        };
        numbers.iter().flat_map(of_slot).collect()
    }

    /// Returns the number of the group of devices that are removed together.
    fn device_group(&self) -> u32 {
        slot_layout::device_group(&self.tag)
    }

    /// Returns true if slots have an IPv6 route.
    fn ipv6(&self) -> bool {
        self.default_policy.ipv6()
    }
}

/// Unused slot.
#[derive(Debug)]
pub(crate) struct Slot {
    pub number: u32,
    /// `None` for [`NicKind::Veth`].
    pub tap: Option<File>,
    pub sockets: SlotSockets,
}

impl Slot {
    /// Returns whether the names of its namespaces still refer to namespaces.
    pub fn is_complete(&self, config: &SlotConfig) -> bool {
        namespace::exists(&config.name(self.number))
            && (self.nic() == NicKind::Tap || namespace::exists(&config.guest_name(self.number)))
    }

    /// Returns the kind of its guest's interface.
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
    /// Sockets for the guest's DNS questions.
    pub dns: dns::DnsSockets,
    /// Sockets for the kernel's messages about connections and rejected packets.
    pub connections: connections::ConnectionSockets,
}

impl SlotSockets {
    /// Opens the sockets in the network namespace of this thread. The slot's table must be active.
    fn open() -> Result<Self, NetError> {
        let dns = dns::DnsSockets::open();
        Ok(Self {
            dns: dns.map_err(NetError::host(format!("listening at {GATEWAY}:53")))?,
            connections: connections::ConnectionSockets::open(),
        })
    }
}

/// Creates slot `number`. Removes it again on failure.
pub(crate) fn create(config: &SlotConfig, number: u32, nic: NicKind) -> Result<Slot, NetError> {
    // The namespace of this thread, which will contain the host's end of the uplink.
    let here = namespace::current()?;
    let name = config.name(number);
    let inside = || create_inside(config, number, nic, here.as_fd());
    let (tap, sockets) = namespace::create(&name, inside)?;
    // If only the host's end fails, the complete namespace must be removed, too.
    configure_host_end(config, number).inspect_err(|_| destroy(config, &[number]))?;
    Ok(Slot {
        number,
        tap,
        sockets,
    })
}

/// Creates the devices and rules of a slot. The calling thread must be in the namespace of the
/// slot. `host` is the namespace of the host.
fn create_inside(
    config: &SlotConfig,
    number: u32,
    nic: NicKind,
    host: BorrowedFd<'_>,
) -> Result<(Option<File>, SlotSockets), NetError> {
    // Enable forwarding before any device exists: new devices inherit the defaults.
    enable_forwarding(config)?;
    match nic {
        NicKind::Tap => {
            let tap = device::tap(TAP).map_err(NetError::host("creating a tap"))?;
            configure(config, number, host)?;
            Ok((Some(tap), SlotSockets::open()?))
        }
        NicKind::Veth => {
            let guest = config.guest_name(number);
            veth::create(&guest)?;
            let configured = configure(config, number, host)
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
fn enable_forwarding(config: &SlotConfig) -> Result<(), NetError> {
    set("/proc/sys/net/ipv4/ip_forward", "1")?;
    if supports_ipv6() {
        // If the host has no IPv6 route, only the guest's device has IPv6 (see `configure`). In a
        // new namespace, the setting may have either value.
        let off = if config.ipv6() { "0" } else { "1" };
        set(&format!("{IPV6_SYSCTL_DIR}/conf/default/disable_ipv6"), off)?;
    }
    if config.ipv6() {
        set(&format!("{IPV6_SYSCTL_DIR}/conf/all/forwarding"), "1")?;
    }
    Ok(())
}

/// Configures the guest's device and the uplink in the namespace of this thread. Creates the host's
/// end of the uplink in the namespace `host`.
fn configure(config: &SlotConfig, number: u32, host: BorrowedFd<'_>) -> Result<(), NetError> {
    let has_ipv6 = supports_ipv6();
    if has_ipv6 {
        set(&format!("{IPV6_SYSCTL_DIR}/conf/{TAP}/disable_ipv6"), "0")?;
    }
    let tap = device::index(TAP).map_err(NetError::host(format!("finding {TAP}")))?;
    // The tap is the newest device in this namespace, and the kernel assigns consecutive indices.
    let uplink = tap + 1;
    let mut changes = RouteBatch::default();
    let lo = LinkChange {
        up: true,
        ..LinkChange::default()
    };
    changes.set_link(LOOPBACK_INDEX, &lo);
    let change = LinkChange {
        mac: Some(GATEWAY_MAC),
        mtu: Some(MTU.into()),
        no_link_local: has_ipv6,
        up: true,
    };
    changes.set_link(tap, &change);
    changes.add_address(tap, GATEWAY.into(), PREFIX);
    // The guest's MAC address is fixed and needs no resolution.
    changes.add_neighbour(tap, ADDRESS.into(), MAC);
    if has_ipv6 {
        // The addresses are set even if the host has no IPv6 route: a guest then gets an error
        // immediately instead of a timeout.
        changes.add_address(tap, GATEWAY6.into(), PREFIX6);
        changes.add_neighbour(tap, ADDRESS6.into(), MAC);
    }
    add_uplink(&mut changes, config, number, uplink, host);
    changes.send()?;
    config.rules.apply()
}

/// Adds the uplink with the index `uplink`. The host's end is created in the namespace `host`.
fn add_uplink(
    changes: &mut RouteBatch,
    config: &SlotConfig,
    number: u32,
    uplink: u32,
    host: BorrowedFd<'_>,
) {
    let name = config.name(number);
    let [own, other] = [(UPLINK, PAIR_MAC[0]), (&name, PAIR_MAC[1])].map(|(name, mac)| VethEnd {
        name,
        mac: Some(mac),
        mtu: config.mtu,
    });
    changes.add_veth(uplink, &own, &other, host);
    let (gateway, address) = config.pair(number);
    changes.add_address(uplink, address.into(), PAIR_PREFIX);
    let change = LinkChange {
        no_link_local: supports_ipv6(),
        up: true,
        ..LinkChange::default()
    };
    changes.set_link(uplink, &change);
    changes.add_default_route(uplink, gateway.into());
    if config.ipv6() {
        let (gateway, address) = config.pair6(number);
        changes.add_address(uplink, address.into(), PAIR_PREFIX6);
        changes.add_neighbour(uplink, gateway.into(), PAIR_MAC[1]);
        changes.add_default_route(uplink, gateway.into());
    }
}

/// Configures the host's end of the uplink in the namespace of this thread. It remains switched off
/// until [`open`].
fn configure_host_end(config: &SlotConfig, number: u32) -> Result<(), NetError> {
    let name = config.name(number);
    let index = device::index(&name).map_err(NetError::host(format!("finding {name}")))?;
    let mut changes = RouteBatch::default();
    if supports_ipv6() {
        let change = LinkChange {
            no_link_local: true,
            ..LinkChange::default()
        };
        changes.set_link(index, &change);
    }
    let (address, _) = config.pair(number);
    changes.add_address(index, address.into(), PAIR_PREFIX);
    if config.ipv6() {
        let (address, peer) = config.pair6(number);
        changes.add_address(index, address.into(), PAIR_PREFIX6);
        changes.add_neighbour(index, peer.into(), PAIR_MAC[0]);
    }
    changes.send()?;
    if config.ipv6() {
        // Make this change last. While another thread holds the kernel's lock of network devices, a
        // write of this setting is repeated in a loop, whereas the requests above sleep.
        forwarding::enable_forwarding6(&name)?;
    }
    Ok(())
}

/// Replaces the policy of the sandbox in slot `number`.
pub(crate) fn enforce(
    config: &SlotConfig,
    number: u32,
    policy: &EgressPolicy,
) -> Result<(), NetError> {
    let script = config.script(policy);
    namespace::enter(&config.name(number), || config.policies.enforce(&script))
}

/// Opens the uplink of slot `number`. Only switches the host's end, so that the state in the
/// namespace is preserved.
pub(crate) fn open(config: &SlotConfig, number: u32) -> Result<(), NetError> {
    let name = config.name(number);
    device::switch(&name, true).map_err(NetError::host(format!("switching {name} on")))
}

/// Removes the connections of slot `number` from the tables of the slot and of the host.
pub(crate) fn forget_connections(config: &SlotConfig, number: u32) -> Result<(), NetError> {
    let name = config.name(number);
    let failed = || NetError::host(format!("removing connections of {name}"));
    let in_slot = || {
        let used = UsedVersions::here();
        // The guest's own addresses appear in the slot's table, and the addresses of the uplink in
        // the host's table.
        connections::delete(&used.of(ADDRESS, ADDRESS6)).map_err(failed())?;
        Ok(used.of(config.pair(number).1, config.pair6(number).1))
    };
    let of_slot = namespace::enter(&name, in_slot)?;
    namespace::outside(|| connections::delete(&of_slot).map_err(failed()))
}

/// Opens sockets for the proxy of slot `number`.
pub(crate) fn listen_for_names(
    config: &SlotConfig,
    number: u32,
) -> Result<ProxyListeners, NetError> {
    namespace::enter(&config.name(number), ProxyListeners::open)
}

/// Opens new sockets in slot `number`, whose guest continued to run without a daemon.
pub(crate) fn open_sockets(config: &SlotConfig, number: u32) -> Result<SlotSockets, NetError> {
    namespace::enter(&config.name(number), SlotSockets::open)
}

/// Removes remains of a crash that block the unused slot `number`: namespaces and a device. The
/// error names the object that cannot be removed.
pub(crate) fn remove_remains(config: &SlotConfig, number: u32) -> Result<(), String> {
    let name = config.name(number);
    for namespace in [config.guest_name(number), name.clone()] {
        if !namespace::remove(&namespace) {
            return Err(namespace::path(&namespace).display().to_string());
        }
    }
    if device::exists(&name) {
        // The kernel may be removing the device together with its namespace.
        let removed = device::remove(&name);
        if device::exists(&name) {
            let why = removed.err().map(|e| format!(" ({e})")).unwrap_or_default();
            return Err(format!("the device {name}{why}"));
        }
    }
    Ok(())
}

/// Removes slots with their namespaces and devices. Objects that are already removed are ignored.
pub(crate) fn destroy(config: &SlotConfig, numbers: &[u32]) {
    let mut devices = Vec::new();
    for &number in numbers {
        let name = config.name(number);
        namespace::remove(&name);
        // Remove this namespace last, because it identifies a slot with a veth pair.
        namespace::remove(&config.guest_name(number));
        // The kernel would remove the device with the namespace, but later, and not while a VMM
        // holds the tap. Ignore devices that are already removed.
        devices.extend(device::index(&name));
    }
    if let Err(e) = device::remove_all(&devices, config.device_group()) {
        tracing::warn!(slots = ?numbers, error = %e, "cannot remove devices of network slots");
    }
}

#[cfg(test)]
#[path = "slot_tests.rs"]
mod tests;
