//! Network configuration of every guest, the same in all slots: so a snapshot fits any of them.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Address of the guest. Link-local, so that it hides no address that a guest could want to reach.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);
/// Length of its network's prefix.
pub const PREFIX: u8 = 30;
/// Its gateway and name server.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 22);
/// Its IPv6 address, unique local ("jiffy" in ASCII, RFC 4193): resolvers prefer IPv4 to it if a
/// name has both (RFC 6724).
pub const ADDRESS6: Ipv6Addr = Ipv6Addr::new(0xfd6a, 0x6966, 0x6679, 0, 0, 0, 0, 0x21);
/// Length of its network's prefix.
pub const PREFIX6: u8 = 126;
/// Its IPv6 gateway.
pub const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd6a, 0x6966, 0x6679, 0, 0, 0, 0, 0x22);
/// MAC address of its interface; locally administered.
pub const MAC: [u8; 6] = [0x02, 0x4a, 0x49, 0x46, 0x46, 0x01];
/// MAC address of the gateway in every slot: a guest that remembers it from another one is right.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x4a, 0x49, 0x46, 0x46, 0x02];
/// Largest IP packet on its interface, in bytes. For a smaller one on the uplink the guest gets
/// ICMP errors, and the TCP MSS is clamped.
pub const MTU: u16 = 1500;

/// Parameters of the kernel's command line for the guest's agent and its network driver, which is
/// told not to wait for word of each frame that the VMM has taken: that would be an interrupt each.
pub fn cmdline() -> String {
    format!(
        "virtio_net.napi_tx=0 jiffy.net={ADDRESS}/{PREFIX},{GATEWAY} jiffy.net6={ADDRESS6}/{PREFIX6},{GATEWAY6} jiffy.dns={GATEWAY}"
    )
}

pub(crate) fn text(mac: [u8; 6]) -> String {
    mac.map(|b| format!("{b:02x}")).join(":")
}
