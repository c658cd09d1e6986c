//! Tests whether an address belongs to the host itself. Sandboxes must not reach such addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

/// Returns true if `address` belongs to this host: then connecting a socket to it selects it as the
/// source address as well. Sends no packet.
pub(crate) fn is_own_address(address: IpAddr) -> bool {
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let own = UdpSocket::bind((any, 0)).and_then(|socket| {
        // Any port would do: connecting a UDP socket only selects its source address.
        socket.connect((address, 9))?;
        socket.local_addr()
    });
    own.is_ok_and(|own| own.ip() == address)
}
