//! Parser of connections as the kernel's connection tracking reports them over netlink
//! (linux/netfilter/nfnetlink_conntrack.h).
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. The *gateway* is the address of the slot at which its DNS server
//! and its proxy listen.

use super::line_ring::LineRing;
use super::netlink::{NetlinkMessage, NetlinkSocket, attribute, be_u32, be_u64};
use crate::guest::{ADDRESS, ADDRESS6, GATEWAY, GATEWAY6};
use jiffy_engine_api::{ConnectionProtocol, ConnectionRecord};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Netlink subsystem of connection tracking.
pub(super) const CONNTRACK: u8 = 1;
/// Request for the connections of a table.
pub(super) const GET: u8 = 1;
/// Request to delete a connection. The message about a deleted connection has the same type.
pub(super) const DELETE: u8 = 2;
/// Request for the number of connections.
const COUNT: u8 = 5;
/// Bit of the multicast group for deleted connections (NFNLGRP_CONNTRACK_DESTROY).
const DESTROY_GROUP: u32 = 1 << 2;
/// Maximum number of connections in a dump.
const MAX_FLOWS: usize = 16 * 1024;
/// Sysctls of a namespace that enable counting and timing of connections.
const SETTINGS: [&str; 3] = [
    "nf_conntrack_acct",
    "nf_conntrack_timestamp",
    "nf_conntrack_events",
];

/// Connection from the guest to an address outside its slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ConntrackFlow {
    /// Id assigned by the kernel, which may reuse it.
    pub id: u32,
    /// Start in milliseconds since 1970. `None` if the kernel recorded no time.
    pub began_ms: Option<u64>,
    /// Protocol, address and port of the destination.
    protocol: ConnectionProtocol,
    address: IpAddr,
    port: Option<u16>,
    /// Bytes from and to the guest. `None` if the kernel did not count them.
    bytes: Option<(u64, u64)>,
}

impl ConntrackFlow {
    /// Parses the attributes of a connection. `None` if the guest did not open it, or if it leads
    /// to the gateway: the DNS server and the proxy record such connections.
    pub fn read(attributes: &[u8]) -> Option<Self> {
        // CTA_TUPLE_ORIG (1) and CTA_TUPLE_REPLY (2). The source of replies is the gateway if the
        // slot's table redirected the connection to the proxy.
        let (from, address, protocol, port) = tuple(attribute(attributes, 1)?)?;
        let (replier, ..) = tuple(attribute(attributes, 2)?)?;
        let own = from == ADDRESS || from == ADDRESS6;
        if !own || replier == GATEWAY || replier == GATEWAY6 {
            return None;
        }
        // CTA_COUNTERS_ORIG (9) and CTA_COUNTERS_REPLY (10), each with CTA_COUNTERS_BYTES (2).
        // CTA_TIMESTAMP (20) has CTA_TIMESTAMP_START (1) in nanoseconds. CTA_ID is 12.
        let bytes = |kind| be_u64(attribute(attribute(attributes, kind)?, 2)?);
        let began = || be_u64(attribute(attribute(attributes, 20)?, 1)?);
        Some(Self {
            id: attribute(attributes, 12).and_then(be_u32).unwrap_or(0),
            began_ms: began().map(|ns| ns / 1_000_000).filter(|ms| *ms > 0),
            protocol,
            address,
            port,
            bytes: bytes(9).zip(bytes(10)),
        })
    }

    /// Converts the connection to a line of the record, with the time `now_ms` if it has none.
    pub fn line(self, now_ms: u64) -> ConnectionRecord {
        ConnectionRecord {
            at_ms: self.began_ms.unwrap_or(now_ms),
            protocol: self.protocol,
            address: Some(self.address),
            port: self.port,
            host: None,
            question: None,
            bytes: self.bytes,
            refused: None,
            header_use: None,
            times: 1,
        }
    }

    /// Returns whether `ring` has a line of this connection.
    pub fn is_among(&self, ring: &LineRing) -> bool {
        self.began_ms
            .is_some_and(|began| ring.contains(self.id, began))
    }
}

/// Parses one direction of a connection: returns source, destination, protocol and destination
/// port.
fn tuple(tuple: &[u8]) -> Option<(IpAddr, IpAddr, ConnectionProtocol, Option<u16>)> {
    // CTA_TUPLE_IP (1), with the source (1) and the destination (2).
    let ip = attribute(tuple, 1)?;
    // IPv6 addresses have the types 3 and 4.
    let address = |kind| match attribute(ip, kind) {
        Some(v4) => Some(IpAddr::V4(Ipv4Addr::from(be_u32(v4)?))),
        None => {
            let v6: [u8; 16] = attribute(ip, kind + 2)?.try_into().ok()?;
            Some(IpAddr::V6(Ipv6Addr::from(v6)))
        }
    };
    // CTA_TUPLE_PROTO (2), with CTA_PROTO_NUM (1) and CTA_PROTO_DST_PORT (3).
    let transport = attribute(tuple, 2)?;
    let [number] = attribute(transport, 1)? else {
        return None;
    };
    let port = attribute(transport, 3).and_then(|p| p.try_into().ok());
    Some((
        address(1)?,
        address(2)?,
        ConnectionProtocol::of(*number),
        port.map(u16::from_be_bytes),
    ))
}

/// Returns the source address of the connection with these attributes, and its tuple.
pub(super) fn source_of(attributes: &[u8]) -> Option<(IpAddr, &[u8])> {
    let original = attribute(attributes, 1)?;
    let (from, ..) = tuple(original)?;
    Some((from, original))
}

/// Opens a socket for messages about deleted connections, in the network namespace of this thread.
pub(super) fn subscribe() -> io::Result<NetlinkSocket> {
    let socket = NetlinkSocket::open(DESTROY_GROUP)?;
    // This request makes the kernel load the module that sends the messages (nf_conntrack_netlink).
    count_entries(&socket)?;
    Ok(socket)
}

/// Returns the number of connections. Check it before a dump: for a dump, the kernel walks the
/// host-wide table, which takes milliseconds even without connections.
pub(super) fn count_entries(socket: &NetlinkSocket) -> io::Result<u32> {
    let mut count = 0;
    socket.command(CONNTRACK, COUNT, 0, &[], |attributes| {
        count = attribute(attributes, 1).and_then(be_u32).unwrap_or(count);
    })?;
    Ok(count)
}

/// Enables counting and timing of connections in this thread's network namespace. Returns true if
/// bytes will be counted. Missing times and events are tolerated.
pub(super) fn enable_counting() -> bool {
    let write = |name| std::fs::write(format!("/proc/sys/net/netfilter/{name}"), "1").is_ok();
    SETTINGS.map(write)[0]
}

/// Returns the flow in a message about a deletion.
pub(super) fn parse_deleted(message: &NetlinkMessage<'_>) -> Option<ConntrackFlow> {
    match message {
        NetlinkMessage::Data(CONNTRACK, DELETE, _, attributes) => ConntrackFlow::read(attributes),
        _ => None,
    }
}

/// Returns the connections in the network namespace of this thread, and true if the list is
/// complete.
pub(super) fn list_all() -> io::Result<(Vec<ConntrackFlow>, bool)> {
    let mut seen = 0;
    let mut flows = Vec::new();
    let socket = NetlinkSocket::open(0)?;
    if count_entries(&socket)? == 0 {
        return Ok((flows, true));
    }
    socket.list(CONNTRACK, GET, |attributes| {
        flows.extend(ConntrackFlow::read(attributes));
        seen += 1;
        seen < MAX_FLOWS
    })?;
    Ok((flows, seen < MAX_FLOWS))
}
