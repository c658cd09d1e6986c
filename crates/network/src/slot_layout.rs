//! Names, ports and addresses that the modules of a slot share with the tables of slot and host.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::error::NetError;
use crate::guest::ADDRESS6;
use ipnet::Ipv6Net;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// Name of the guest's device in a slot's namespace.
pub(crate) const TAP: &str = "tap0";

/// Name of the slot's uplink.
pub(crate) const UPLINK: &str = "up0";

/// Name of a slot's link to a private network.
pub(crate) const NETWORK_LINK: &str = "net0";

/// Directory of IPv6 settings. It exists if the kernel supports IPv6.
pub(crate) const IPV6_SYSCTL_DIR: &str = "/proc/sys/net/ipv6";

/// Returns true if the kernel supports IPv6.
pub(crate) fn supports_ipv6() -> bool {
    static IS_SUPPORTED: LazyLock<bool> = LazyLock::new(|| Path::new(IPV6_SYSCTL_DIR).exists());
    *IS_SUPPORTED
}

/// Writes a kernel setting.
pub(crate) fn set(path: &str, value: &str) -> Result<(), NetError> {
    fs::write(path, value).map_err(NetError::host(format!("setting {path}")))
}

/// Returns the prefix of names of namespaces and devices. With a tag of six digits, it has 9 of the
/// at most 15 characters of a device name. The number of a slot has at most four digits.
pub(crate) fn prefix(tag: &str) -> String {
    format!("jf{tag}-")
}

/// Returns the IPv6 addresses of the uplinks: a subrange of the guests' range that the tag selects.
pub(crate) fn range6(tag: &str) -> Ipv6Net {
    // The range consists of the guests' 48-bit prefix, the tag (six hexadecimal digits) and a 1.
    // The 1 separates it from the guest's own network, even if the tag is 0.
    let tag = u128::from_str_radix(tag, 16).unwrap_or(0) & 0xff_ffff;
    let network = u128::from(ADDRESS6) >> 80 << 80;
    Ipv6Net::new_assert((network | tag << 56 | 1 << 32).into(), 112)
}

/// Ports to which the slot's table redirects connections to ports 80 and 443.
pub(crate) const PROXY_PORTS: [u16; 2] = [3180, 3443];

/// Returns the number of the group of the host's devices that are removed together.
pub(crate) fn device_group(tag: &str) -> u32 {
    // "j" and the tag, so that no other program uses the same group.
    0x6a00_0000 | (u32::from_str_radix(tag, 16).unwrap_or(0) & 0xff_ffff)
}

/// Returns the name of the host's table for the data directory with this tag.
pub(crate) fn table(tag: &str) -> String {
    format!("jiffy_{tag}")
}
