//! Names, ports and addresses that a slot shares with the tables of slot and host.

use crate::error::NetError;
use crate::guest::ADDRESS6;
use ipnet::Ipv6Net;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// The guest's device in a namespace.
pub(crate) const TAP: &str = "tap0";

/// The slot's uplink.
pub(crate) const UPLINK: &str = "up0";

/// IPv6 settings, if the kernel supports it.
pub(crate) const IPV6_SYSCTL_DIR: &str = "/proc/sys/net/ipv6";

/// Returns true if the kernel supports IPv6.
pub(crate) fn knows_ipv6() -> bool {
    static KNOWS: LazyLock<bool> = LazyLock::new(|| Path::new(IPV6_SYSCTL_DIR).exists());
    *KNOWS
}

pub(crate) fn set(path: &str, value: &str) -> Result<(), NetError> {
    fs::write(path, value).map_err(NetError::host(format!("setting {path}")))
}

/// Prefix of names of namespaces and devices. At most 10 characters, so that a number of four
/// digits fits a device's name.
pub(crate) fn prefix(tag: &str) -> String {
    format!("jf{tag}-")
}

/// IPv6 addresses of the pairs: within the guests' range, by the data directory's tag.
pub(crate) fn range6(tag: &str) -> Ipv6Net {
    // The tag has six digits; the range is this daemon's alone, like the tag.
    let tag = u128::from_str_radix(tag, 16).unwrap_or(0) & 0xff_ffff;
    let network = u128::from(ADDRESS6) >> 80 << 80;
    Ipv6Net::new_assert((network | tag << 56 | 1 << 32).into(), 112)
}

/// Ports to which the slot's table redirects connections to ports 80 and 443.
pub(crate) const PROXY_PORTS: [u16; 2] = [3180, 3443];

/// Number of the group that the host's devices of slots are put into to be removed at once.
pub(crate) fn device_group(tag: &str) -> u32 {
    // "j" and the tag: no other program's, like the tag.
    0x6a00_0000 | (u32::from_str_radix(tag, 16).unwrap_or(0) & 0xff_ffff)
}

/// Name of the host's table for the data directory of `tag`.
pub(crate) fn table(tag: &str) -> String {
    format!("jiffy_{tag}")
}
