//! Guest's end of a slot for guests without a virtual machine (gVisor): a network namespace with
//! `lo` and `eth0`, one end of a veth pair. An engine with its own network stack reads the
//! interface's configuration there.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::error::NetError;
use crate::guest::{ADDRESS, ADDRESS6, GATEWAY, GATEWAY_MAC, GATEWAY6, MAC, MTU, PREFIX, PREFIX6};
use crate::namespace;
use crate::rtnetlink::{LOOPBACK_INDEX, LinkChange, RouteBatch, VethEnd};
use crate::slot_layout::{IPV6_SYSCTL_DIR, TAP, set, supports_ipv6};
use std::net::IpAddr;
use std::os::fd::AsFd;

/// Name of the guest's interface, as in a virtual machine.
const GUEST_INTERFACE: &str = "eth0";
/// Index of the interface, higher than the indices that a kernel assigns in a new namespace.
const GUEST_INDEX: u32 = 100;

/// Creates namespace `name` with an interface whose peer is in the namespace of this thread.
/// Removes the namespace again on failure.
pub(crate) fn create(name: &str) -> Result<(), NetError> {
    let slot = namespace::current()?;
    namespace::create(name, || {
        if supports_ipv6() {
            // The defaults of a new namespace can differ between hosts. Enable IPv6 without
            // autoconfiguration: `configure` assigns the addresses.
            for (path, value) in [
                ("all/disable_ipv6", "0"),
                ("default/accept_ra", "0"),
                ("default/autoconf", "0"),
            ] {
                set(&format!("{IPV6_SYSCTL_DIR}/conf/{path}"), value)?;
            }
        }
        let [own, other] = [(GUEST_INTERFACE, Some(MAC)), (TAP, None)].map(|(name, mac)| VethEnd {
            name,
            mac,
            mtu: MTU.into(),
        });
        let mut changes = RouteBatch::default();
        // The peer is created in the namespace of the slot.
        changes.add_veth(GUEST_INDEX, &own, &other, slot.as_fd());
        changes.send()
    })
}

/// Assigns addresses and default routes to the interface in namespace `name`. The peer must be up.
pub(crate) fn configure(name: &str) -> Result<(), NetError> {
    namespace::enter(name, || {
        let mut changes = RouteBatch::default();
        let lo = LinkChange {
            up: true,
            ..LinkChange::default()
        };
        changes.set_link(LOOPBACK_INDEX, &lo);
        let change = LinkChange {
            no_link_local: supports_ipv6(),
            up: true,
            ..LinkChange::default()
        };
        changes.set_link(GUEST_INDEX, &change);
        let v4 = (IpAddr::from(ADDRESS), PREFIX, IpAddr::from(GATEWAY));
        let v6 = (IpAddr::from(ADDRESS6), PREFIX6, IpAddr::from(GATEWAY6));
        for (address, prefix_length, gateway) in
            std::iter::once(v4).chain(supports_ipv6().then_some(v6))
        {
            changes.add_address(GUEST_INDEX, address, prefix_length);
            // The host's address needs no resolution.
            changes.add_neighbour(GUEST_INDEX, gateway, GATEWAY_MAC);
            changes.add_default_route(GUEST_INDEX, gateway);
        }
        changes.send()
    })
}
