//! Addresses that do not belong to public servers. The table is used for the rules of slots and for
//! the results of name resolution.
//!
//! Source: IANA's registries of special-purpose addresses (RFC 6890, RFC 8190), row by row.
//! Globally reachable rows are included: those anycast services may be provided by the host's own
//! network. Additions: multicast, IPv6 outside 2000::/3 (the only global unicast part, RFC 4291),
//! and public-looking addresses of cloud providers' internal services.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use ipnet::IpNet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

/// Range that sandboxes cannot reach unless the host's operator permits it.
#[derive(Debug, Clone, Copy)]
struct SpecialRange {
    address: IpAddr,
    /// Prefix length.
    length: u8,
    /// Name in the registry, and the document that assigns it.
    #[cfg_attr(not(test), expect(dead_code, reason = "the source of each row"))]
    source: &'static str,
}

/// Returns an IPv4 range.
const fn v4([a, b, c, d]: [u8; 4], length: u8, source: &'static str) -> SpecialRange {
    SpecialRange {
        address: IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
        length,
        source,
    }
}

/// Returns an IPv6 range. The four numbers are the first 64 bits of its address.
const fn v6([a, b, c, d]: [u16; 4], length: u8, source: &'static str) -> SpecialRange {
    SpecialRange {
        address: IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0)),
        length,
        source,
    }
}

/// All special ranges.
const TABLE: [SpecialRange; 40] = [
    // IPv4 registry.
    v4([0, 0, 0, 0], 8, "This network, RFC 791"),
    v4([10, 0, 0, 0], 8, "Private use, RFC 1918"),
    v4([100, 64, 0, 0], 10, "Shared address space, RFC 6598"),
    v4([127, 0, 0, 0], 8, "Loopback, RFC 1122"),
    v4([169, 254, 0, 0], 16, "Link local, RFC 3927"),
    v4([172, 16, 0, 0], 12, "Private use, RFC 1918"),
    // This range includes DS-Lite, NAT64 discovery and the anycast addresses of PCP and TURN.
    v4([192, 0, 0, 0], 24, "IETF protocol assignments, RFC 6890"),
    v4([192, 0, 2, 0], 24, "Documentation (TEST-NET-1), RFC 5737"),
    v4([192, 31, 196, 0], 24, "AS112-v4, RFC 7535"),
    v4([192, 52, 193, 0], 24, "AMT, RFC 7450"),
    v4(
        [192, 88, 99, 0],
        24,
        "Deprecated 6to4 relay anycast, RFC 7526",
    ),
    v4([192, 168, 0, 0], 16, "Private use, RFC 1918"),
    v4([192, 175, 48, 0], 24, "Direct delegation AS112, RFC 7534"),
    v4([198, 18, 0, 0], 15, "Benchmarking, RFC 2544"),
    v4(
        [198, 51, 100, 0],
        24,
        "Documentation (TEST-NET-2), RFC 5737",
    ),
    v4([203, 0, 113, 0], 24, "Documentation (TEST-NET-3), RFC 5737"),
    v4([240, 0, 0, 0], 4, "Reserved, RFC 1112"),
    v4([255, 255, 255, 255], 32, "Limited broadcast, RFC 919"),
    // Additions to the registry.
    v4([224, 0, 0, 0], 4, "Multicast, RFC 5771"),
    v4([168, 63, 129, 16], 32, "Wire server, DHCP and DNS of Azure"),
    // IPv6 outside of 2000::/3: loopback, mapped and translated IPv4 (::ffff:0:0/96, 64:ff9b::/96,
    // 64:ff9b:1::/48), discard and dummy prefixes (100::/64, 100:0:0:1::/64), segment identifiers,
    // local, site-local and multicast addresses.
    v6([0, 0, 0, 0], 3, "Not global unicast, RFC 4291"),
    v6([0x4000, 0, 0, 0], 2, "Not global unicast, RFC 4291"),
    v6([0x8000, 0, 0, 0], 1, "Not global unicast, RFC 4291"),
    v6([0x64, 0xff9b, 0, 0], 96, "IPv4-IPv6 translation, RFC 6052"),
    v6([0x64, 0xff9b, 1, 0], 48, "IPv4-IPv6 translation, RFC 8215"),
    v6([0x100, 0, 0, 0], 64, "Discard-only, RFC 6666"),
    v6([0x100, 0, 0, 1], 64, "Dummy prefix, RFC 9780"),
    v6([0x5f00, 0, 0, 0], 16, "Segment routing SIDs, RFC 9602"),
    v6([0xfc00, 0, 0, 0], 7, "Unique local, RFC 4193"),
    v6([0xfe80, 0, 0, 0], 10, "Link local, RFC 4291"),
    v6([0xfec0, 0, 0, 0], 10, "Deprecated site local, RFC 3879"),
    v6([0xff00, 0, 0, 0], 8, "Multicast, RFC 4291"),
    // IPv6 registry within 2000::/3. The first row includes Teredo, benchmarking, AMT, AS112-v6,
    // ORCHID and drone identifiers.
    v6([0x2001, 0, 0, 0], 23, "IETF protocol assignments, RFC 2928"),
    v6([0x2001, 0xdb8, 0, 0], 32, "Documentation, RFC 3849"),
    v6([0x2002, 0, 0, 0], 16, "6to4, RFC 3056"),
    v6(
        [0x2620, 0x4f, 0x8000, 0],
        48,
        "Direct delegation AS112, RFC 7534",
    ),
    v6([0x3fff, 0, 0, 0], 20, "Documentation, RFC 9637"),
    // This range was returned to IANA and is unassigned.
    v6([0x3ffe, 0, 0, 0], 16, "6bone, RFC 3701"),
    // IPv4-mapped addresses, as sockets use them. A literal, because `v6` sets only the first 64
    // bits.
    SpecialRange {
        address: IpAddr::V6(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0)),
        length: 96,
        source: "IPv4-mapped, RFC 4291",
    },
    v6([0, 0, 0, 0], 128, "Unspecified, RFC 4291"),
];

/// Ranges of the table, disjoint and sorted, as nftables sets require.
static RANGES: LazyLock<Vec<IpNet>> = LazyLock::new(|| {
    let nets = TABLE.map(|row| IpNet::new_assert(row.address, row.length));
    IpNet::aggregate(&nets.to_vec())
});

/// Returns the ranges that sandboxes cannot reach unless the host's operator permits them.
pub(crate) fn ranges() -> &'static [IpNet] {
    &RANGES
}

/// Returns true if `address` is in one of the ranges.
pub(crate) fn contains(address: IpAddr) -> bool {
    RANGES.iter().any(|net| net.contains(&address))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// First and last addresses of all rows of both registries and of the additions, and metadata
    /// services of cloud providers.
    #[test]
    fn special_purpose_ranges_are_not_public() {
        let all = "0.0.0.0 0.255.255.255 10.0.0.0 10.255.255.255 100.64.0.0 100.127.255.255 \
             127.0.0.1 127.255.255.255 169.254.0.0 169.254.169.254 169.254.170.2 172.16.0.0 \
             172.31.255.255 192.0.0.0 192.0.0.8 192.0.0.9 192.0.0.10 192.0.0.170 192.0.0.171 \
             192.0.0.192 192.0.0.255 192.0.2.0 192.0.2.255 192.31.196.1 192.52.193.1 \
             192.88.99.1 192.88.99.2 192.168.0.0 192.168.255.255 192.175.48.1 198.18.0.0 \
             198.19.255.255 198.51.100.0 198.51.100.255 203.0.113.0 203.0.113.255 224.0.0.1 \
             239.255.255.255 240.0.0.0 255.255.255.255 168.63.129.16 100.100.100.200 :: ::1 \
             ::ffff:8.8.8.8 ::8.8.8.8 64:ff9b::808:808 64:ff9b:1::1 100:: 100::1:0:0:0 \
             100:0:0:1:: 2001:: 2001:1::1 2001:1::2 2001:1::3 2001:2:: 2001:3:: 2001:4:112:: \
             2001:10:: 2001:20:: 2001:30:: 2001:1ff:ffff:: 2001:db8:: 2001:db8:ffff:: 2002:: \
             2002:ffff:: 2620:4f:8000::1 3ffe::1 3fff:: 3fff:fff:ffff:: 5f00:: fc00:: \
             fd00:ec2::254 fd20:ce::254 fd00:c1::a9fe:a9fe fe80:: febf:: fec0:: feff:: \
             ff02::1 4000:: 8000::";
        for address in all.split_whitespace() {
            assert!(contains(ip(address)), "{address}");
        }
    }

    #[test]
    fn addresses_beside_special_ranges_are_public() {
        let all = "1.0.0.0 9.255.255.255 11.0.0.1 100.63.255.255 100.128.0.0 126.255.255.255 \
             128.0.0.0 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 191.255.255.255 \
             192.0.1.0 192.0.3.0 192.88.98.255 192.88.100.0 192.167.255.255 192.169.0.0 \
             198.17.255.255 198.20.0.0 198.51.99.255 198.51.101.0 203.0.112.255 203.0.114.0 \
             223.255.255.255 168.63.129.15 168.63.129.17 8.8.8.8 1.1.1.1 2000:: 2001:200:: \
             2001:db7::1 2001:db9::1 2003:: 2600::1 2606:4700:4700::1111 2a00::1 3fff:1000:: \
             3ffd::1";
        for address in all.split_whitespace() {
            assert!(!contains(ip(address)), "{address}");
        }
    }

    #[test]
    fn every_row_names_its_source_and_the_ranges_are_disjoint() {
        for row in TABLE {
            assert!(
                row.source.contains("RFC ") || row.source.contains("Azure"),
                "{row:?}"
            );
            let net = IpNet::new(row.address, row.length).unwrap();
            assert_eq!(net, net.trunc(), "{row:?}");
            assert!(ranges().iter().any(|range| range.contains(&net)), "{row:?}");
        }
        for (at, one) in ranges().iter().enumerate() {
            let others = ranges().iter().skip(at + 1);
            assert!(others.clone().all(|o| !one.contains(o) && !o.contains(one)));
        }
    }
}
