//! User ids that the user namespace of this process maps. Other code decides by them whether this
//! process is root of the host, or root in the namespace of an unprivileged user.

use std::fs;

/// User ids that Jiffy assigns to the processes of sandboxes if it runs as root of the host: the
/// first id, and the id after the last.
const HOST_IDS: (u64, u64) = (1_900_000_000, 2_110_000_000);

/// Range of ids in an id map of `/proc` (user_namespaces(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct IdMapExtent {
    first: u64,
    count: u64,
}

/// Parses an id map: each line has the first id inside, the first id outside, and the count.
fn parse(map: &str) -> Vec<IdMapExtent> {
    let extent = |line: &str| {
        let mut words = line.split_whitespace();
        let first = words.next()?.parse().ok()?;
        let count = words.nth(1)?.parse().ok()?;
        Some(IdMapExtent { first, count })
    };
    map.lines().filter_map(extent).collect()
}

fn read() -> Vec<IdMapExtent> {
    parse(&fs::read_to_string("/proc/self/uid_map").unwrap_or_default())
}

fn includes_host_ids(map: &[IdMapExtent]) -> bool {
    let (first, end) = HOST_IDS;
    map.iter()
        .any(|extent| extent.first <= first && end <= extent.first + extent.count)
}

/// Returns whether the user namespace of this process maps the user ids of root's sandboxes.
pub fn has_host_ids() -> bool {
    includes_host_ids(&read())
}

/// Returns whether this process is root and can use the user ids of root's sandboxes. False for
/// root in the user namespace of an unprivileged user.
pub fn is_host_root() -> bool {
    nix::unistd::Uid::effective().is_root() && has_host_ids()
}

/// Returns whether the user namespace of this process maps only its own user.
pub fn maps_only_itself() -> bool {
    read().iter().map(|extent| extent.count).sum::<u64>() <= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_ids_are_found_only_in_a_namespace_that_maps_them() {
        assert!(includes_host_ids(&parse(
            "         0          0 4294967295\n"
        )));
        for map in ["0 1000 1\n", "0 1000 1\n1 100000 65536\n", "", "0 x 1\n"] {
            assert!(!includes_host_ids(&parse(map)), "{map}");
        }
        let map = parse("0 1000 1\n1 100000 65536\n");
        assert_eq!(map.iter().map(|e| e.count).sum::<u64>(), 65_537);
    }
}
