//! Users and groups that the namespace of this process maps.

use std::fs;

/// First of the users that sandboxes of root's run as, and one past the last.
const HOST_IDS: (u64, u64) = (1_900_000_000, 2_110_000_000);

/// A range of ids in a map of `/proc` (user_namespaces(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    first: u64,
    count: u64,
}

fn parse(map: &str) -> Vec<Extent> {
    let extent = |line: &str| {
        let mut words = line.split_whitespace();
        let first = words.next()?.parse().ok()?;
        let count = words.nth(1)?.parse().ok()?;
        Some(Extent { first, count })
    };
    map.lines().filter_map(extent).collect()
}

fn read() -> Vec<Extent> {
    parse(&fs::read_to_string("/proc/self/uid_map").unwrap_or_default())
}

fn holds_host_ids(map: &[Extent]) -> bool {
    let (first, end) = HOST_IDS;
    map.iter()
        .any(|extent| extent.first <= first && end <= extent.first + extent.count)
}

/// Tells if the users that root's sandboxes run as exist in this process's user namespace.
pub fn has_host_ids() -> bool {
    holds_host_ids(&read())
}

/// Tells if this process is root and can become the users that root's sandboxes run as. Root of a
/// namespace that an ordinary user made is not.
pub fn is_host_root() -> bool {
    nix::unistd::Uid::effective().is_root() && has_host_ids()
}

/// Tells if this process's user namespace has one user only, its own.
pub fn maps_only_itself() -> bool {
    read().iter().map(|extent| extent.count).sum::<u64>() <= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_namespace_with_the_users_of_sandboxes_has_them() {
        assert!(holds_host_ids(&parse("         0          0 4294967295\n")));
        for map in ["0 1000 1\n", "0 1000 1\n1 100000 65536\n", "", "0 x 1\n"] {
            assert!(!holds_host_ids(&parse(map)), "{map}");
        }
        let map = parse("0 1000 1\n1 100000 65536\n");
        assert_eq!(map.iter().map(|e| e.count).sum::<u64>(), 65_537);
    }
}
