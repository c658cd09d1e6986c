//! Connections as the kernel's connection tracking reports them
//! (linux/netfilter/nfnetlink_conntrack.h).

use super::netlink::{NetlinkMessage, NetlinkSocket, attribute, long, word};
use crate::guest::{ADDRESS, ADDRESS6, GATEWAY, GATEWAY6};
use jiffy_engine_api::{ConnectionProtocol, ConnectionRecord};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The subsystem, its requests, and its message for a deleted connection.
pub(super) const CONNTRACK: u8 = 1;
pub(super) const GET: u8 = 1;
pub(super) const DELETE: u8 = 2;
const COUNT: u8 = 5;
/// Bit of the group that gets messages of deleted connections (NFNLGRP_CONNTRACK_DESTROY).
const DESTROY_GROUP: u32 = 1 << 2;
/// Most connections of one dump.
const MAX_FLOWS: usize = 16 * 1024;
/// Settings of a namespace by which connections are counted and timed.
const SETTINGS: [&str; 3] = [
    "nf_conntrack_acct",
    "nf_conntrack_timestamp",
    "nf_conntrack_events",
];

/// A connection of the guest beyond its slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ConntrackFlow {
    /// The kernel's id, which it may reuse.
    pub id: u32,
    /// Milliseconds since 1970; none: not timed.
    pub began_ms: Option<u64>,
    protocol: ConnectionProtocol,
    address: IpAddr,
    port: Option<u16>,
    bytes: Option<(u64, u64)>,
}

impl ConntrackFlow {
    /// Parses the attributes of one. None: it is not the guest's own, or leads to its gateway: DNS
    /// and connections by name are recorded by the server and the proxy.
    pub fn read(attributes: &[u8]) -> Option<Self> {
        let (from, address, protocol, port) = tuple(attribute(attributes, 1)?)?;
        let (answers, ..) = tuple(attribute(attributes, 2)?)?;
        let own = from == ADDRESS || from == ADDRESS6;
        if !own || answers == GATEWAY || answers == GATEWAY6 {
            return None;
        }
        let bytes = |kind| long(attribute(attribute(attributes, kind)?, 2)?);
        let began = || long(attribute(attribute(attributes, 20)?, 1)?);
        Some(Self {
            id: attribute(attributes, 12).and_then(word).unwrap_or(0),
            began_ms: began().map(|ns| ns / 1_000_000).filter(|ms| *ms > 0),
            protocol,
            address,
            port,
            bytes: bytes(9).zip(bytes(10)),
        })
    }

    /// The connection as a line of the record; `now_ms` if it was not timed.
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
            times: 1,
        }
    }
}

/// Source, destination, protocol and the destination's port of one direction.
fn tuple(tuple: &[u8]) -> Option<(IpAddr, IpAddr, ConnectionProtocol, Option<u16>)> {
    let ip = attribute(tuple, 1)?;
    // IPv6 addresses have types of their own, in the same order.
    let address = |kind| match attribute(ip, kind) {
        Some(v4) => Some(IpAddr::V4(Ipv4Addr::from(word(v4)?))),
        None => {
            let v6: [u8; 16] = attribute(ip, kind + 2)?.try_into().ok()?;
            Some(IpAddr::V6(Ipv6Addr::from(v6)))
        }
    };
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

/// Address at which the connection with these attributes began, and its tuple.
pub(super) fn source_of(attributes: &[u8]) -> Option<(IpAddr, &[u8])> {
    let original = attribute(attributes, 1)?;
    let (from, ..) = tuple(original)?;
    Some((from, original))
}

/// Opens a socket for messages of deleted connections, in the network namespace of this thread.
pub(super) fn listen() -> io::Result<NetlinkSocket> {
    let socket = NetlinkSocket::open(DESTROY_GROUP)?;
    // A kernel that has it as a module loads it now.
    entries(&socket)?;
    Ok(socket)
}

/// Number of connections. A dump of them makes the kernel walk through a table of the whole host,
/// which takes milliseconds also if there are none.
pub(super) fn entries(socket: &NetlinkSocket) -> io::Result<u32> {
    let mut count = 0;
    socket.command(CONNTRACK, COUNT, 0, &[], |attributes| {
        count = attribute(attributes, 1).and_then(word).unwrap_or(count);
    })?;
    Ok(count)
}

/// Enables counting and timing of connections in this thread's network namespace; returns true if
/// they are counted.
pub(super) fn count() -> bool {
    let write = |name| std::fs::write(format!("/proc/sys/net/netfilter/{name}"), "1").is_ok();
    SETTINGS.map(write)[0]
}

/// The flow in a message of a deletion.
pub(super) fn gone(message: &NetlinkMessage<'_>) -> Option<ConntrackFlow> {
    match message {
        NetlinkMessage::Of(CONNTRACK, DELETE, _, attributes) => ConntrackFlow::read(attributes),
        _ => None,
    }
}

/// Present connections in the network namespace of this thread, and true if these are all.
pub(super) fn all() -> io::Result<(Vec<ConntrackFlow>, bool)> {
    let mut seen = 0;
    let mut flows = Vec::new();
    let socket = NetlinkSocket::open(0)?;
    if entries(&socket)? == 0 {
        return Ok((flows, true));
    }
    socket.list(CONNTRACK, GET, |attributes| {
        flows.extend(ConntrackFlow::read(attributes));
        seen += 1;
        seen < MAX_FLOWS
    })?;
    Ok((flows, seen < MAX_FLOWS))
}
