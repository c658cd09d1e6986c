//! What every guest sees, whichever slot it has: so a snapshot fits any of them.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Address of the guest. Link-local, so that it hides nothing that a guest could want to reach.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);
/// Length of its network's prefix.
pub const PREFIX: u8 = 30;
/// Its gateway, which is its name server, too.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 22);
/// Its address in IPv6, unique local ("jiffy" in ASCII, RFC 4193): resolvers prefer IPv4 to it wherever a name has both (RFC 6724).
pub const ADDRESS6: Ipv6Addr = Ipv6Addr::new(0xfd6a, 0x6966, 0x6679, 0, 0, 0, 0, 0x21);
/// Length of its network's prefix.
pub const PREFIX6: u8 = 126;
/// Its gateway there.
pub const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd6a, 0x6966, 0x6679, 0, 0, 0, 0, 0x22);
/// Hardware address of its card; locally administered.
pub const MAC: [u8; 6] = [0x02, 0x4a, 0x49, 0x46, 0x46, 0x01];
/// That of the gateway: a guest may remember it from another slot.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x4a, 0x49, 0x46, 0x46, 0x02];
/// Largest IP packet on its card, in bytes. What the way out does not carry is told to the guest, or is clamped where TCP begins.
pub const MTU: u16 = 1500;

/// Words on the kernel's command line that tell the guest's agent.
pub fn cmdline() -> String {
    format!(
        "jiffy.net={ADDRESS}/{PREFIX},{GATEWAY} jiffy.net6={ADDRESS6}/{PREFIX6},{GATEWAY6} jiffy.dns={GATEWAY}"
    )
}

pub(crate) fn text(mac: [u8; 6]) -> String {
    mac.map(|b| format!("{b:02x}")).join(":")
}
