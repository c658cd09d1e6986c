//! Captured messages of a kernel (6.18, x86-64) about a guest's connections. A *slot* is the
//! network namespace of a guest with its devices and rules.
#![allow(clippy::unwrap_used)]

use super::flow::{ConntrackFlow, parse_deleted};
use super::netlink::{NetlinkMessage, messages};
use super::refused_packet::RefusedPacket;
use jiffy_engine_api::{ConnectionProtocol, ConnectionRecord, RefusalReason};
use std::net::Ipv4Addr;

/// Dump entry of a closed TCP connection.
const LISTED: &str = "\
    1c01000000012200000000004b5328ec02000000340001801400018008000100a9fe001508000200c00002011c0002800500\
    01000600000006000200ae5500000600030000500000340002801400018008000100c000020108000200a9fe00151c000280\
    0500010006000000060002000050000006000300ae550000080003000000000e080008000000000008000c0059235fb80800\
    0b0000000001080007000000003b300004802c0001800500010005000000050002000a000000050003000a00000006000400\
    2300000006000500270000001c0009800c00010000000000000000050c00020000000000000001111c000a800c0001000000\
    0000000000040c00020000000000000004c0100014800c00010018ea588d8dab03ab";
/// Deletion of the entry of a datagram without an answer.
const DELETED: &str = "\
    ec00000002010000000000000000000002000000340001801400018008000100a9fe001508000200c00002011c0002800500\
    010011000000060002009c4200000600030000530000340002801400018008000100c000020108000200a9fe00151c000280\
    05000100110000000600020000530000060003009c42000008000c00d37e693a08000300000002081c0009800c0001000000\
    0000000000010c000200000000000000001f1c000a800c00010000000000000000000c00020000000000000000001c001480\
    0c00010018ea588da08f5e490c00020018ea588ddc29ccdd0c001b0018ea58924cf16f8d";
/// Two rejected packets, by rules and at the limit, and the end of their batch.
const REFUSED: &str = "\
    880000000004000000000000000000000200000108000100080003000a000a0072756c657300000008000500000000010800\
    0b000000000008000e000000000008000c0000000000400009004500003c4e32400040068075a9fe0015c00002019c410051\
    3ff44d6000000000a002ffd76c4300000204ffd70402080a311c916f000000000103030a6c00000000040000000000000000\
    00000200000108000100080003000a000a006c696d6974000000080005000000000108000b000000000008000e0000000000\
    08000c0000000001230009004500001f003440004011ce86a9fe0015c00002019c400052000b6c3161626300140000000300\
    0000000000000000000000000001";

/// Time of lines whose connection has no time of its own, in milliseconds.
const NOW_MS: u64 = 5;

/// Decodes hexadecimal digits.
fn bytes(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pairs = digits
        .chunks(2)
        .map(|pair| std::str::from_utf8(pair).unwrap());
    pairs
        .map(|pair| u8::from_str_radix(pair, 16).unwrap())
        .collect()
}

/// Returns the flow of the first dump entry of the connection tracking table (subsystem 1, message
/// 0).
fn listed(datagram: &[u8]) -> Option<ConntrackFlow> {
    messages(datagram).find_map(|message| match message {
        NetlinkMessage::Data(1, 0, _, attributes) => ConntrackFlow::read(attributes),
        _ => None,
    })
}

/// Checks that a line is for the host 192.0.2.1, with this protocol and port.
fn assert_destination(protocol: ConnectionProtocol, port: u16, line: &ConnectionRecord) {
    let address = Some(Ipv4Addr::new(192, 0, 2, 1).into());
    assert_eq!(
        (line.protocol, line.address, line.port),
        (protocol, address, Some(port))
    );
}

#[test]
fn a_connection_has_its_time_and_its_bytes() {
    let flow = listed(&bytes(LISTED)).unwrap();
    // The times and amounts are in the message above. Its time is in nanoseconds.
    let began = 0x18ea_588d_8dab_03ab / 1_000_000;
    assert_eq!((flow.id, flow.began_ms), (0x5923_5fb8, Some(began)));
    let line = flow.line(NOW_MS);
    assert_destination(ConnectionProtocol::Tcp, 80, &line);
    assert_eq!(
        (line.at_ms, line.bytes, line.refused),
        (began, Some((0x111, 0x4c0)), None)
    );
    let datagram = bytes(DELETED);
    let line = messages(&datagram)
        .find_map(|m| parse_deleted(&m))
        .unwrap()
        .line(NOW_MS);
    assert_destination(ConnectionProtocol::Udp, 83, &line);
    assert_eq!(line.bytes, Some((31, 0)));
    assert_eq!(listed(&datagram), None);
}

#[test]
fn connections_of_others_and_to_the_gateway_are_omitted() {
    // Replaces one occurrence of an address in the message.
    let changed = |from: [u8; 4], to: [u8; 4], occurrence: usize| {
        let mut datagram = bytes(LISTED);
        let places: Vec<usize> = (0..datagram.len() - 4)
            .filter(|at| datagram[*at..*at + 4] == from)
            .collect();
        datagram[places[occurrence]..places[occurrence] + 4].copy_from_slice(&to);
        listed(&datagram)
    };
    let (guest, world) = ([169, 254, 0, 21], [192, 0, 2, 1]);
    // A connection from the slot's own address, as the proxy opens, and a connection that the table
    // redirected to the proxy.
    assert_eq!(changed(guest, [198, 18, 0, 1], 0), None);
    assert_eq!(changed(world, [169, 254, 0, 22], 1), None);
    assert!(changed(world, [192, 0, 2, 9], 1).is_some());
}

#[test]
fn a_batch_of_refused_packets_is_parsed_one_by_one() {
    let datagram = bytes(REFUSED);
    let packets: Vec<RefusedPacket> = messages(&datagram)
        .filter_map(|m| RefusedPacket::read(&m))
        .collect();
    assert_eq!(packets.iter().map(|p| p.number).collect::<Vec<_>>(), [0, 1]);
    let lines: Vec<ConnectionRecord> = packets.into_iter().map(|p| p.line(NOW_MS)).collect();
    assert_destination(ConnectionProtocol::Tcp, 81, &lines[0]);
    assert_destination(ConnectionProtocol::Udp, 82, &lines[1]);
    assert_eq!(lines[0].refused, Some(RefusalReason::Rules));
    assert_eq!(
        (lines[1].refused, lines[1].bytes),
        (Some(RefusalReason::Limit), None)
    );
    assert_eq!(messages(&datagram).last(), Some(NetlinkMessage::End(0)));
}

#[test]
fn damaged_messages_cause_no_panic() {
    for text in [LISTED, DELETED, REFUSED] {
        let whole = bytes(text);
        for length in 0..whole.len() {
            read(&whole[..length]);
        }
        for at in 0..whole.len() {
            for value in [0, 1, 3, 4, 0x7f, 0x80, 0xff] {
                let mut datagram = whole.clone();
                datagram[at] = value;
                read(&datagram);
            }
        }
    }
}

/// Parses a datagram in all ways, and ignores the results.
fn read(datagram: &[u8]) {
    let _ = listed(datagram);
    for message in messages(datagram) {
        let _ = (parse_deleted(&message), RefusedPacket::read(&message));
    }
}
