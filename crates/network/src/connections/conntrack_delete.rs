//! Removal of a sandbox's entries from connection tracking tables: from the host's table when a
//! sandbox is removed, and from the tables of slot and host after a rollback.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use super::flow::{CONNTRACK, DELETE, GET, count_entries, source_of};
use super::netlink::{NetlinkSocket, encode};
use std::io;
use std::net::{IpAddr, Ipv4Addr};

/// Attribute with the original direction of a connection (CTA_TUPLE_ORIG). This number and the
/// following ones are defined in linux/netfilter/nfnetlink_conntrack.h.
const TUPLE_ORIG: u16 = 1;
/// Attribute with the addresses of a direction (CTA_TUPLE_IP).
const TUPLE_IP: u16 = 1;
/// Attribute with the IPv4 source address (CTA_IP_V4_SRC).
const V4_SOURCE: u16 = 1;
/// Attribute with the filter of a request (CTA_FILTER).
const FILTER: u16 = 25;
/// Attributes with the compared fields of the two directions (CTA_FILTER_ORIG_FLAGS,
/// CTA_FILTER_REPLY_FLAGS).
const FILTER_ORIG_FLAGS: u16 = 1;
const FILTER_REPLY_FLAGS: u16 = 2;
/// Filter by source address alone (CTA_FILTER_F_CTA_IP_SRC).
const BY_SOURCE: u32 = 1;
/// Flag of an attribute that contains others.
const NESTED: u16 = 0x8000;

/// Removes the connections that were opened from `addresses` from the connection table of this
/// thread's network namespace. Without the removal, connections to an unresponsive server would
/// remain in the table for days.
pub(crate) fn delete(addresses: &[IpAddr]) -> io::Result<()> {
    let socket = NetlinkSocket::open(0)?;
    // Check the number of entries first: walking the host-wide table takes milliseconds.
    if addresses.is_empty() || count_entries(&socket)? == 0 {
        return Ok(());
    }
    let mut remaining = Vec::new();
    for address in addresses {
        match address {
            // The call fails on kernels that only delete by a complete tuple.
            IpAddr::V4(v4) if delete_by_source(&socket, *v4).is_ok() => {}
            // For IPv6 addresses, Linux inverts the comparison in this filter (6.18,
            // ctnetlink_filter_match_tuple) and would delete the connections of all other
            // addresses.
            _ => remaining.push(*address),
        }
    }
    // The table is dumped once per IP version, for all remaining addresses together.
    let (v4, v6): (Vec<IpAddr>, Vec<IpAddr>) = remaining.into_iter().partition(IpAddr::is_ipv4);
    for (family, of_family) in [(libc::AF_INET, v4), (libc::AF_INET6, v6)] {
        if !of_family.is_empty() && count_entries(&socket)? > 0 {
            // Both address families fit into a byte (linux/socket.h).
            delete_individually(&socket, family as u8, &of_family)?;
        }
    }
    Ok(())
}

/// Deletes all connections from `address` with one request, by a filter in the kernel.
fn delete_by_source(socket: &NetlinkSocket, address: Ipv4Addr) -> io::Result<()> {
    let ip = encode(TUPLE_IP | NESTED, &encode(V4_SOURCE, &address.octets()));
    // Compare only the source address of the original direction, and no field of replies.
    let flags = [
        encode(FILTER_ORIG_FLAGS, &BY_SOURCE.to_ne_bytes()),
        encode(FILTER_REPLY_FLAGS, &0_u32.to_ne_bytes()),
    ];
    let attributes = [
        encode(TUPLE_ORIG | NESTED, &ip),
        encode(FILTER | NESTED, &flags.concat()),
    ];
    socket.command_for(
        libc::AF_INET as u8,
        CONNTRACK,
        DELETE,
        0,
        &attributes.concat(),
        |_| {},
    )
}

/// Dumps the table and deletes each connection from `addresses` by its tuple.
fn delete_individually(socket: &NetlinkSocket, family: u8, addresses: &[IpAddr]) -> io::Result<()> {
    let mut tuples = Vec::new();
    socket.list_for(family, CONNTRACK, GET, |attributes| {
        if let Some((from, tuple)) = source_of(attributes)
            && addresses.contains(&from)
        {
            tuples.push(encode(TUPLE_ORIG | NESTED, tuple));
        }
        true
    })?;
    for tuple in tuples {
        // Ignore the error: the entry may have been removed concurrently.
        let _ = socket.command_for(family, CONNTRACK, DELETE, 0, &tuple, |_| {});
    }
    Ok(())
}

#[cfg(test)]
#[path = "conntrack_delete_tests.rs"]
mod tests;
