//! Removal of entries of sandboxes that are gone from the host's connection tracking table.

use super::flow::{CONNTRACK, DELETE, entries, source};
use super::netlink::{NetlinkSocket, encode};
use std::io;
use std::net::IpAddr;

/// Attributes of a connection (linux/netfilter/nfnetlink_conntrack.h).
const TUPLE_ORIG: u16 = 1;
const TUPLE_IP: u16 = 1;
const V4_SOURCE: u16 = 1;
const V6_SOURCE: u16 = 3;
const FILTER: u16 = 25;
const FILTER_ORIG_FLAGS: u16 = 1;
const FILTER_REPLY_FLAGS: u16 = 2;
/// Filter by source address alone (CTA_FILTER_F_CTA_IP_SRC).
const BY_SOURCE: u32 = 1;
/// Flag of an attribute that contains others.
const NESTED: u16 = 0x8000;

/// Removes the connections that began at one of `addresses` from the table of this thread's network
/// namespace: a silent server would keep them there for days.
pub(crate) fn delete(addresses: &[IpAddr]) -> io::Result<()> {
    let socket = NetlinkSocket::open(0)?;
    if addresses.is_empty() || entries(&socket)? == 0 {
        return Ok(());
    }
    for address in addresses {
        // Kernels that delete by a whole tuple only refuse this.
        if by_filter(&socket, *address).is_err() {
            one_by_one(&socket, *address)?;
        }
    }
    Ok(())
}

fn family(address: IpAddr) -> u8 {
    // Both fit (linux/socket.h).
    match address {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

fn by_filter(socket: &NetlinkSocket, address: IpAddr) -> io::Result<()> {
    let address_attribute = match address {
        IpAddr::V4(v4) => encode(V4_SOURCE, &v4.octets()),
        IpAddr::V6(v6) => encode(V6_SOURCE, &v6.octets()),
    };
    let ip = encode(TUPLE_IP | NESTED, &address_attribute);
    let flags = [
        encode(FILTER_ORIG_FLAGS, &BY_SOURCE.to_ne_bytes()),
        encode(FILTER_REPLY_FLAGS, &0_u32.to_ne_bytes()),
    ];
    let attributes = [
        encode(TUPLE_ORIG | NESTED, &ip),
        encode(FILTER | NESTED, &flags.concat()),
    ];
    socket.command_for(
        family(address),
        CONNTRACK,
        DELETE,
        0,
        &attributes.concat(),
        |_| {},
    )
}

fn one_by_one(socket: &NetlinkSocket, address: IpAddr) -> io::Result<()> {
    let mut tuples = Vec::new();
    socket.list(CONNTRACK, super::flow::GET, |attributes| {
        if let Some(tuple) = source(attributes, address) {
            tuples.push(encode(TUPLE_ORIG | NESTED, tuple));
        }
        true
    })?;
    for tuple in tuples {
        // An entry that vanished meanwhile is no error.
        let _ = socket.command_for(family(address), CONNTRACK, DELETE, 0, &tuple, |_| {});
    }
    Ok(())
}
