//! Test with a real connection tracking table, in a network namespace of the test. Needs root.
//!
//! A *slot* is a network namespace with devices and rules that the daemon prepares in advance and
//! assigns to one guest. [`in_slot`] runs its argument in a new namespace with the devices of a
//! slot.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::program;
use crate::test_slot::in_slot;
use std::net::UdpSocket;

/// Addresses whose connections the tests delete, and addresses whose connections remain.
const OWN: [&str; 2] = ["198.18.0.1", "fd6a::1"];
const OTHER: [&str; 2] = ["198.18.0.3", "fd6a::3"];

/// Returns the sources of all connections in this network namespace, sorted.
fn sources() -> Vec<String> {
    let socket = NetlinkSocket::open(0).unwrap();
    let mut all = Vec::new();
    socket
        .list(CONNTRACK, GET, |attributes| {
            all.extend(source_of(attributes).map(|(from, _)| from.to_string()));
            true
        })
        .unwrap();
    all.sort();
    all
}

/// Opens two connections from each address.
fn connect() {
    let addresses = OWN.iter().chain(&OTHER);
    let added = addresses
        .clone()
        .map(|address| match address.parse().unwrap() {
            IpAddr::V4(_) => format!("addr add {address}/32 dev lo\n"),
            IpAddr::V6(_) => format!("addr add {address}/128 dev lo nodad\n"),
        });
    let commands = format!("link set lo up\n{}", added.collect::<String>());
    program::run("ip", &["-batch", "-"], &commands).unwrap();
    // A rule with `ct` activates connection tracking in the namespace.
    program::nft(
        "table inet t { chain c { type filter hook output priority 0; ct state new accept; }; }",
    )
    .unwrap();
    for address in addresses {
        let socket = UdpSocket::bind((*address, 0)).unwrap();
        // The destination is the loopback address of the same IP version.
        let to = if address.contains(':') {
            "::1"
        } else {
            "127.0.0.1"
        };
        for port in [7, 9] {
            socket.send_to(b"x", (to, port)).unwrap();
        }
    }
}

/// Opens connections, deletes the connections from these addresses, and returns the sources of the
/// others.
fn sources_after(deleted: &[&str]) -> Option<Vec<String>> {
    in_slot(|| {
        connect();
        // Each of the four addresses has two connections.
        assert_eq!(sources().len(), 8);
        let addresses: Vec<IpAddr> = deleted.iter().map(|a| a.parse().unwrap()).collect();
        delete(&addresses).unwrap();
        sources()
    })
}

#[test]
fn only_connections_of_the_given_addresses_are_deleted() {
    for deleted in [&OWN[..], &OWN[..1], &OWN[1..], &["fd6a::99"], &[]] {
        let all = OWN.iter().chain(&OTHER);
        let retained = all.filter(|address| !deleted.contains(address));
        let mut expected: Vec<&str> = retained.flat_map(|address| [*address; 2]).collect();
        expected.sort_unstable();
        let Some(actual) = sources_after(deleted) else {
            return;
        };
        assert_eq!(actual, expected, "{deleted:?}");
    }
}
