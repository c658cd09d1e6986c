//! IP versions that a network namespace has used, according to the kernel's counters.
//!
//! Deleting connections requires a walk over the kernel's whole table, which takes milliseconds for
//! IPv6. The walk is skipped for sandboxes that never sent a packet, which are the majority.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Files with the counters of IPv4 and IPv6 packets in the namespace of the thread.
const COUNTERS: &str = "/proc/thread-self/net/snmp";
const COUNTERS6: &str = "/proc/thread-self/net/snmp6";

/// IP versions of which a unicast packet was forwarded or sent. True if this is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UsedVersions {
    /// True if IPv4 was used.
    v4: bool,
    /// True if IPv6 was used.
    v6: bool,
}

impl Default for UsedVersions {
    fn default() -> Self {
        Self { v4: true, v6: true }
    }
}

impl UsedVersions {
    /// Returns the versions used in the network namespace of this thread.
    pub fn here() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self::parse(&read(COUNTERS), &read(COUNTERS6))
    }

    /// Parses the counters of the kernel for IPv4 and IPv6.
    fn parse(counters: &str, counters6: &str) -> Self {
        // The file has a line of names and a line of numbers.
        let mut lines = counters.lines().filter(|line| line.starts_with("Ip: "));
        let [names, numbers] = [lines.next(), lines.next()].map(Option::unwrap_or_default);
        let columns = names.split_whitespace().zip(numbers.split_whitespace());
        let v4 = |wanted: &str| find(columns.clone(), wanted);
        let rows = counters6.lines().filter_map(|line| {
            let mut words = line.split_whitespace();
            Some((words.next()?, words.next()?))
        });
        let v6 = |wanted: &str| find(rows.clone(), wanted);
        // Subtract multicast: every IPv6 device announces its group memberships.
        let sent6 = || Some(v6("Ip6OutRequests")?.saturating_sub(v6("Ip6OutMcastPkts")?));
        // A counter that cannot be read counts as used: a needless walk is better than stale
        // entries.
        let any = |counts: [Option<u64>; 2]| counts.iter().any(|count| *count != Some(0));
        Self {
            v4: any([v4("ForwDatagrams"), v4("OutRequests")]),
            v6: any([v6("Ip6OutForwDatagrams"), sent6()]),
        }
    }

    /// Returns the addresses whose version was used.
    pub fn of(self, v4: Ipv4Addr, v6: Ipv6Addr) -> Vec<IpAddr> {
        let v4 = self.v4.then_some(IpAddr::V4(v4));
        v4.into_iter()
            .chain(self.v6.then_some(IpAddr::V6(v6)))
            .collect()
    }
}

/// Returns the value of a counter. `None` if it is missing or not a number.
fn find<'a>(mut counters: impl Iterator<Item = (&'a str, &'a str)>, wanted: &str) -> Option<u64> {
    counters.find(|(name, _)| *name == wanted)?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::program;
    use crate::test_slot::in_slot;
    use std::net::UdpSocket;

    const NONE: UsedVersions = UsedVersions {
        v4: false,
        v6: false,
    };

    #[test]
    fn a_version_is_used_after_its_first_packet() {
        let counts = in_slot(|| {
            program::run("ip", &["link", "set", "lo", "up"], "").unwrap();
            let mut seen = vec![UsedVersions::here()];
            for address in ["127.0.0.1", "::1"] {
                let socket = UdpSocket::bind((address, 0)).unwrap();
                socket.send_to(b"x", (address, 9)).unwrap();
                seen.push(UsedVersions::here());
            }
            seen
        });
        let Some(counts) = counts else {
            return;
        };
        let v4 = UsedVersions { v4: true, ..NONE };
        assert_eq!(counts, [NONE, v4, UsedVersions::default()]);
    }

    #[test]
    fn forwarded_packets_count_and_those_to_groups_do_not() {
        let v4 = |forwarded, sent| {
            format!("Ip: Forwarding ForwDatagrams OutRequests\nIp: 1 {forwarded} {sent}\nIcmp: A\n")
        };
        let v6 = |forwarded, sent, groups| {
            format!(
                "Ip6OutForwDatagrams \t{forwarded}\nIp6OutRequests {sent}\nIp6OutMcastPkts {groups}\n"
            )
        };
        let quiet6 = v6(0, 4, 4);
        assert_eq!(UsedVersions::parse(&v4(0, 0), &quiet6), NONE);
        let only4 = UsedVersions { v4: true, ..NONE };
        assert_eq!(UsedVersions::parse(&v4(1, 0), &quiet6), only4);
        assert_eq!(UsedVersions::parse(&v4(0, 1), &quiet6), only4);
        let only6 = UsedVersions { v6: true, ..NONE };
        assert_eq!(UsedVersions::parse(&v4(0, 0), &v6(1, 4, 4)), only6);
        assert_eq!(UsedVersions::parse(&v4(0, 0), &v6(0, 5, 4)), only6);
    }

    #[test]
    fn counters_that_cannot_be_read_count_as_used() {
        for text in ["", "Ip: ForwDatagrams\n", "Ip: ForwDatagrams\nIp: x\n"] {
            assert_eq!(UsedVersions::parse(text, ""), UsedVersions::default());
        }
    }
}
