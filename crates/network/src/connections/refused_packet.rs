//! Parser of rejected packets, which the rules of a slot log over netlink
//! (linux/netfilter/nfnetlink_log.h).
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use super::netlink::{NetlinkMessage, NetlinkSocket, attribute, be_u32, encode};
use jiffy_engine_api::{ConnectionProtocol, ConnectionRecord, RefusalReason};
use std::io;
use std::net::{IpAddr, Ipv6Addr};

/// Netlink subsystem of packet logging.
const LOG: u8 = 4;
/// Message about a packet.
const PACKET: u8 = 0;
/// Request that changes settings.
const CONFIGURE: u8 = 1;
/// Log group of the slot's table. A slot's namespace has no other user of it.
pub(crate) const LOG_GROUP: u16 = 1;
/// Number of copied bytes per packet: the longest IPv4 header and the ports after it.
const COPIED_BYTES: u32 = 64;
/// Maximum number of packets per batch.
const MAX_BATCH: u32 = 50;
/// Time in hundredths of a second after which the kernel sends an incomplete batch.
const BATCH_TIMEOUT_CS: u32 = 10;

/// Rejected packet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RefusedPacket {
    /// Sequence number since the socket was opened.
    pub number: u32,
    /// Protocol, address and port of the destination.
    protocol: ConnectionProtocol,
    address: IpAddr,
    port: Option<u16>,
    reason: RefusalReason,
}

/// Returns the `nft` statement that logs a packet with the reason.
pub(crate) fn statement(reason: RefusalReason) -> String {
    format!("log prefix \"{}\" group {LOG_GROUP}", reason.name())
}

/// Opens a socket for rejected packets, in the network namespace of this thread.
pub(super) fn subscribe() -> io::Result<NetlinkSocket> {
    let socket = NetlinkSocket::open(0)?;
    let mut mode = COPIED_BYTES.to_be_bytes().to_vec();
    // NFULNL_COPY_PACKET and a byte of padding.
    mode.extend([2, 0]);
    let settings = [
        // NFULNL_CFG_CMD_BIND.
        encode(1, &[1]),
        // NFULA_CFG_MODE, NFULA_CFG_TIMEOUT and NFULA_CFG_QTHRESH.
        encode(2, &mode),
        encode(4, &BATCH_TIMEOUT_CS.to_be_bytes()),
        encode(5, &MAX_BATCH.to_be_bytes()),
        // NFULNL_CFG_F_SEQ: number the packets.
        encode(6, &1_u16.to_be_bytes()),
    ];
    socket.command(LOG, CONFIGURE, LOG_GROUP, &settings.concat(), |_| {})?;
    Ok(socket)
}

impl RefusedPacket {
    /// Parses the packet in a message. `None` for other messages.
    pub fn read(message: &NetlinkMessage<'_>) -> Option<Self> {
        let NetlinkMessage::Data(LOG, PACKET, _, attributes) = message else {
            return None;
        };
        // NFULA_PAYLOAD (9), NFULA_PREFIX (10), which is the name of the reason, and NFULA_SEQ
        // (12).
        let packet = attribute(attributes, 9)?;
        let prefix = attribute(attributes, 10).unwrap_or_default();
        let limit = prefix.starts_with(RefusalReason::Limit.name().as_bytes());
        let (protocol, address, port) = header(packet)?;
        Some(Self {
            number: attribute(attributes, 12).and_then(be_u32)?,
            protocol,
            address,
            port,
            reason: if limit {
                RefusalReason::Limit
            } else {
                RefusalReason::Rules
            },
        })
    }

    /// Converts the packet to a line of the record.
    pub fn line(self, now_ms: u64) -> ConnectionRecord {
        ConnectionRecord {
            at_ms: now_ms,
            protocol: self.protocol,
            address: Some(self.address),
            port: self.port,
            host: None,
            question: None,
            bytes: None,
            refused: Some(self.reason),
            header_use: None,
            times: 1,
        }
    }
}

/// Returns protocol, destination and destination port from the headers of the guest's packet.
fn header(packet: &[u8]) -> Option<(ConnectionProtocol, IpAddr, Option<u16>)> {
    match packet.first()? >> 4 {
        4 => header4(packet),
        6 => header6(packet),
        _ => None,
    }
}

/// Parses an IPv4 header (RFC 791 3.1).
fn header4(packet: &[u8]) -> Option<(ConnectionProtocol, IpAddr, Option<u16>)> {
    // The header length is in units of four bytes.
    let length = usize::from(packet.first()? & 15) * 4;
    if length < 20 {
        return None;
    }
    let protocol = ConnectionProtocol::of(*packet.get(9)?);
    let address: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
    // Only the first fragment of a packet has the ports.
    let begins = u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]) & 0x1fff == 0;
    let rest = packet.get(length..).filter(|_| begins);
    Some((protocol, address.into(), port(protocol, rest)))
}

/// Parses an IPv6 header (RFC 8200 3) without extension headers. `None` for multicast, which
/// neighbour discovery uses.
fn header6(packet: &[u8]) -> Option<(ConnectionProtocol, IpAddr, Option<u16>)> {
    let protocol = ConnectionProtocol::of(*packet.get(6)?);
    let address: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
    let address = Ipv6Addr::from(address);
    let port = port(protocol, packet.get(40..));
    (!address.is_multicast()).then_some((protocol, address.into(), port))
}

/// Returns the destination port from the bytes after the IP header.
fn port(protocol: ConnectionProtocol, rest: Option<&[u8]>) -> Option<u16> {
    match protocol {
        ConnectionProtocol::Tcp | ConnectionProtocol::Udp => {
            let port: [u8; 2] = rest?.get(2..4)?.try_into().ok()?;
            Some(u16::from_be_bytes(port))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::net::Ipv4Addr;

    /// Returns a UDP packet of the guest to port 53 of 192.0.2.1.
    fn packet() -> Vec<u8> {
        let mut packet = vec![
            0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 169, 254, 0, 21, 192, 0, 2, 1,
        ];
        packet.extend([0x9c, 0x40, 0, 53, 0, 8, 0, 0]);
        packet
    }

    #[test]
    fn a_packet_is_parsed_to_its_destination() {
        let to = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
        assert_eq!(
            header(&packet()),
            Some((ConnectionProtocol::Udp, to, Some(53)))
        );
        // A later fragment of a packet has no ports.
        let mut later = packet();
        later[7] = 9;
        assert_eq!(header(&later), Some((ConnectionProtocol::Udp, to, None)));
        // The header claims to be longer than the packet.
        let mut lies = packet();
        lies[0] = 0x4f;
        assert_eq!(header(&lies), Some((ConnectionProtocol::Udp, to, None)));
        // Invalid bytes with IP version and header length, and an IPv6 packet that is too short.
        for bad in [0x44, 0x50, 0x60, 0x00, 0xff] {
            let mut packet = packet();
            packet[0] = bad;
            assert_eq!(header(&packet), None, "{bad}");
        }
        for length in 0..20 {
            assert_eq!(header(&packet()[..length]), None);
        }
        let to = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
        let mut six = vec![0x60, 0, 0, 0, 0, 8, 6, 64];
        six.extend([0; 16]);
        six.extend(to.octets());
        six.extend([0x9c, 0x40, 1, 0xbb]);
        assert_eq!(
            header(&six),
            Some((ConnectionProtocol::Tcp, to.into(), Some(443)))
        );
        assert_eq!(header(&six[..39]), None);
        six[24] = 0xff;
        assert_eq!(header(&six), None);
    }

    #[test]
    fn a_refused_packet_has_its_reason_and_its_number() {
        let mut body = encode(9, &packet());
        body.extend(encode(10, b"limit\0"));
        body.extend(encode(12, &7_u32.to_be_bytes()));
        let message = NetlinkMessage::Data(LOG, PACKET, LOG_GROUP, &body);
        let packet = RefusedPacket::read(&message).unwrap();
        assert_eq!((packet.number, packet.reason), (7, RefusalReason::Limit));
        let line = packet.line(5);
        assert_eq!((line.at_ms, line.port, line.bytes), (5, Some(53), None));
        assert_eq!(
            RefusedPacket::read(&NetlinkMessage::Data(LOG, 1, LOG_GROUP, &body)),
            None
        );
        assert_eq!(RefusedPacket::read(&NetlinkMessage::End(0)), None);
    }
}
