//! Network configuration of guests. It is equal in all slots, so that a snapshot fits any slot.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Address of the guest. It is link-local, so that it hides no address that the guest may want to
/// reach.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);
/// Prefix length of the guest's IPv4 network.
pub const PREFIX: u8 = 30;
/// Gateway and name server of the guest.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 22);
/// IPv6 address of the guest, unique local ("jiffy" in ASCII, RFC 4193). Resolvers prefer IPv4 for
/// names with both (RFC 6724).
pub const ADDRESS6: Ipv6Addr = Ipv6Addr::new(0xfd6a, 0x6966, 0x6679, 0, 0, 0, 0, 0x21);
/// Prefix length of the guest's IPv6 network.
pub const PREFIX6: u8 = 126;
/// IPv6 gateway of the guest.
pub const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd6a, 0x6966, 0x6679, 0, 0, 0, 0, 0x22);
/// MAC address of the guest's interface, locally administered.
pub const MAC: [u8; 6] = [0x02, 0x4a, 0x49, 0x46, 0x46, 0x01];
/// MAC address of the gateway in every slot. A restored guest's neighbour cache is therefore valid.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x4a, 0x49, 0x46, 0x46, 0x02];
/// MTU in bytes of the guest's interface. If the MTU of the uplink is smaller, the guest receives
/// ICMP errors, and the TCP MSS is clamped.
pub const MTU: u16 = 1500;

/// Returns kernel command line parameters for the guest's agent and its network driver. `napi_tx=0`
/// disables an interrupt for each transmitted frame.
pub fn cmdline() -> String {
    format!(
        "virtio_net.napi_tx=0 jiffy.net={ADDRESS}/{PREFIX},{GATEWAY} jiffy.net6={ADDRESS6}/{PREFIX6},{GATEWAY6} jiffy.dns={GATEWAY}"
    )
}

/// Formats a MAC address.
pub(crate) fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|b| format!("{b:02x}")).join(":")
}
