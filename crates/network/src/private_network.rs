//! Private networks: namespaces that connect slots of one owner, and nothing else.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! ```text
//! guest A - tap0 [ slot of A ] net0
//!     - mA [ namespace of the network ] mB - net0 [ slot of B ] tap0 - guest B
//! ```
//! The namespace of a network is named after a digest of owner and name, so that two owners never
//! share one. It has a link to the slot of each running member and no other device. No packet in it
//! can therefore reach the host, the internet, or a sandbox of another network.
//!
//! The network is a router with one route per member. All neighbours are permanent, and the kernel
//! of the host is at both ends of each link, so that guests take no part in ARP. The slot of a
//! member replaces the source of each packet by the address of the member. The network drops a
//! packet whose source is not the address of its link.

use crate::NetError;
use crate::device;
use crate::namespace;
use crate::program;
use crate::rtnetlink::{LOOPBACK_INDEX, LinkChange, RouteBatch, VethEnd};
use crate::slot::SlotConfig;
use crate::slot_layout::{IPV6_SYSCTL_DIR, NETWORK_LINK, TAP, prefix, set, supports_ipv6};
use data_encoding::HEXLOWER;
use ipnet::{IpNet, Ipv4Net};
use jiffy_engine_api::PRIVATE_NETWORK_RANGE;
use sha2::{Digest, Sha256};
use std::fmt;
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;

/// Gateway of all members. No interface has this address: members send packets to its MAC address.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 64, 1);
/// MAC addresses of a link's ends, in the slot and in the namespace of the network. They are fixed,
/// so that neither end has to resolve the other's address.
const LINK_MAC: [[u8; 6]; 2] = [
    [0x02, 0x4a, 0x49, 0x46, 0x46, 0x05],
    [0x02, 0x4a, 0x49, 0x46, 0x46, 0x06],
];
/// Part of the names of namespaces that slots do not have.
const NAME_PART: &str = "net-";
/// Prefix of the names of links in the namespace of a network. The number of the slot follows.
const LINK_PREFIX: &str = "m";
/// Directory with the IPv4 settings of devices.
const CONF: &str = "/proc/sys/net/ipv4/conf";

/// Identifies the private network of one owner.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NetworkId(String);

impl NetworkId {
    /// Returns the id of the network `name` of an owner. `None` is the owner of the host.
    pub fn new(owner: Option<&str>, name: &str) -> Self {
        // The length separates owner and name. The owner of the host has no length, so that no key
        // can have the same input.
        let owner = owner.map_or_else(String::new, |owner| format!("{}:{owner}", owner.len()));
        let digest = Sha256::digest(format!("{owner}/{name}"));
        Self(HEXLOWER.encode(&digest[..16]))
    }

    /// Returns the ids of the networks that have a namespace.
    pub fn existing(tag: &str) -> Vec<Self> {
        let prefix = prefix(tag) + NAME_PART;
        let names = namespace::list(&prefix);
        let ids = names.iter().filter_map(|name| name.strip_prefix(&prefix));
        ids.map(|id| Self(id.to_owned())).collect()
    }

    /// Returns the name of the network's namespace.
    fn namespace(&self, tag: &str) -> String {
        format!("{}{NAME_PART}{self}", prefix(tag))
    }
}

impl fmt::Display for NetworkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the range of all private networks.
pub(crate) fn range() -> Ipv4Net {
    let (address, length) = PRIVATE_NETWORK_RANGE;
    Ipv4Net::new_assert(address, length)
}

/// Returns whether all addresses of `net` are in the range of private networks.
pub(crate) fn contains(net: &IpNet) -> bool {
    IpNet::from(range()).contains(net)
}

/// Returns whether some addresses of `net` are in the range of private networks.
pub(crate) fn overlaps(net: &IpNet) -> bool {
    contains(net) || net.contains(&IpNet::from(range()))
}

/// Returns the name of the link to slot `number` in the namespace of a network.
fn link_name(number: u32) -> String {
    format!("{LINK_PREFIX}{number}")
}

/// Returns the index of a link in the namespace of its network. It is higher than the indices that
/// a kernel assigns in a new namespace.
fn link_index(number: u32) -> u32 {
    100 + number
}

/// Links slot `number` to a network, in which it has `address`. Creates the namespace of the
/// network if necessary. Does nothing if the link exists, for example after a restart of the
/// daemon. After a failure, the caller must call [`leave`]. The functions [`join`], [`leave`] and
/// [`remove_if_empty`] must not be called at the same time.
pub(crate) fn join(
    config: &SlotConfig,
    number: u32,
    network: &NetworkId,
    address: Ipv4Addr,
) -> Result<(), NetError> {
    let own = network.namespace(&config.tag);
    // A crash may have left a name without a namespace, or a namespace that is not set up. A
    // namespace with links is complete.
    if !has_links(&own) {
        namespace::remove(&own);
        namespace::create(&own, set_up)?;
    }
    let slot = config.name(number);
    let has_link = || Ok(device::exists(NETWORK_LINK));
    let (link, is_linked) = (link_name(number), namespace::enter(&slot, has_link)?);
    let path = namespace::path(&slot);
    let slot_file =
        File::open(&path).map_err(NetError::host(format!("opening {}", path.display())))?;
    let created = namespace::enter(&own, || {
        match (device::exists(&link), is_linked) {
            (true, true) => return Ok(false),
            (true, false) => device::remove(&link)?,
            _ => {}
        }
        add_link(number, address, &slot_file)?;
        Ok(true)
    });
    if created? {
        namespace::enter(&slot, || configure_slot(address))?;
    }
    Ok(())
}

/// Configures the new namespace of this thread as the router of a network.
fn set_up() -> Result<(), NetError> {
    set("/proc/sys/net/ipv4/ip_forward", "1")?;
    set(&format!("{CONF}/all/accept_source_route"), "0")?;
    if supports_ipv6() {
        // Disable IPv6 before any link exists: new links inherit the default.
        set(&format!("{IPV6_SYSCTL_DIR}/conf/default/disable_ipv6"), "1")?;
    }
    // Add the rules before any link exists: no packet must pass without them.
    program::nft(&script())?;
    let mut changes = RouteBatch::default();
    let lo = LinkChange {
        up: true,
        ..LinkChange::default()
    };
    changes.set_link(LOOPBACK_INDEX, &lo);
    // Packets to an address without a member are received here, and rejected by the rules.
    changes.add_local_route(range());
    changes.send()
}

/// Returns the rules of a network's namespace. A packet must have the address of its link as its
/// source, and must lead to another link. Packets to an address without a member are rejected, so
/// that connections to a member that has ended fail at their next packet.
fn script() -> String {
    let range = range();
    format!(
        r#"table inet jiffy_network {{
  chain arriving {{
    type filter hook prerouting priority raw; policy drop;
    meta nfproto ipv4 ip daddr {range} fib saddr . iif oif != 0 accept
  }}
  chain here {{
    type filter hook input priority filter; policy drop;
    meta l4proto tcp reject with tcp reset
    reject with icmp type port-unreachable
  }}
  chain passing {{
    type filter hook forward priority filter; policy drop;
    iifname "{LINK_PREFIX}*" oifname "{LINK_PREFIX}*" accept
  }}
}}
"#
    )
}

/// Adds the link to slot `number` in the namespace of this thread, which is the network's.
fn add_link(number: u32, address: Ipv4Addr, slot: &File) -> Result<(), NetError> {
    let index = link_index(number);
    let name = link_name(number);
    let [other, own] =
        [(NETWORK_LINK, LINK_MAC[0]), (&name, LINK_MAC[1])].map(|(name, mac)| VethEnd {
            name,
            mac: Some(mac),
            mtu: crate::guest::MTU.into(),
        });
    let mut changes = RouteBatch::default();
    changes.add_veth(index, &own, &other, slot.as_fd());
    changes.set_link(index, &switched_on());
    changes.add_neighbour(index, address.into(), LINK_MAC[0]);
    // The former slot of a resumed sandbox may still have a link with this address.
    changes.replace_route(index, Ipv4Net::from(address), None);
    changes.send()
}

/// Configures the link in the namespace of this thread, which is a slot.
fn configure_slot(address: Ipv4Addr) -> Result<(), NetError> {
    // Private networks carry IPv4 only.
    if supports_ipv6() {
        set(
            &format!("{IPV6_SYSCTL_DIR}/conf/{NETWORK_LINK}/disable_ipv6"),
            "1",
        )?;
    }
    // The guest's packets to its own address return over the interface on which they arrived.
    for device in ["all", TAP] {
        set(&format!("{CONF}/{device}/send_redirects"), "0")?;
    }
    let index =
        device::index(NETWORK_LINK).map_err(NetError::host(format!("finding {NETWORK_LINK}")))?;
    let mut changes = RouteBatch::default();
    changes.add_address(index, address.into(), 32);
    changes.set_link(index, &switched_on());
    changes.add_neighbour(index, GATEWAY.into(), LINK_MAC[1]);
    changes.replace_route(index, range(), Some(GATEWAY));
    changes.send()
}

/// Returns the change that switches a link on, without a link-local IPv6 address.
fn switched_on() -> LinkChange {
    LinkChange {
        no_link_local: supports_ipv6(),
        up: true,
        ..LinkChange::default()
    }
}

/// Removes the link of slot `number` from a network. While a guest is replaced, its sandbox has two
/// slots: `successor` is the other one, which receives the packets to `address` from now on. Errors
/// are logged.
pub(crate) fn leave(
    config: &SlotConfig,
    number: u32,
    (network, address): (&NetworkId, Ipv4Addr),
    successor: Option<u32>,
) {
    let own = network.namespace(&config.tag);
    if !namespace::exists(&own) {
        return;
    }
    let link = link_name(number);
    let remove = || {
        if device::exists(&link) {
            device::remove(&link)?;
        }
        if let Some(successor) = successor {
            let mut changes = RouteBatch::default();
            changes.replace_route(link_index(successor), Ipv4Net::from(address), None);
            changes.send()?;
        }
        Ok(())
    };
    if let Err(e) = namespace::enter(&own, remove) {
        tracing::warn!(error = %e, %network, link, "cannot remove a link of a private network");
    }
}

/// Removes the namespace of a network if it has no links. Returns whether it exists no longer.
pub(crate) fn remove_if_empty(config: &SlotConfig, network: &NetworkId) -> bool {
    let own = network.namespace(&config.tag);
    !has_links(&own) && namespace::remove(&own)
}

/// Returns whether the namespace `own` of a network exists and has links. A namespace whose links
/// cannot be listed counts as one with links.
fn has_links(own: &str) -> bool {
    let list = || {
        let names = device::names().map_err(NetError::host("listing devices"))?;
        Ok(names.iter().any(|name| name.starts_with(LINK_PREFIX)))
    };
    namespace::exists(own) && namespace::enter(own, list).unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_of_different_owners_are_different() {
        let ids = [
            NetworkId::new(None, "a"),
            NetworkId::new(Some(""), "a"),
            NetworkId::new(Some("a"), "a"),
            NetworkId::new(Some("a"), "b"),
            NetworkId::new(None, "1:a/a"),
            NetworkId::new(Some("a/"), "a"),
        ];
        for (i, id) in ids.iter().enumerate() {
            assert!(!ids[..i].contains(id), "{i}");
        }
        assert_eq!(ids[0], NetworkId::new(None, "a"));
    }

    #[test]
    fn ranges_are_compared_with_the_range_of_networks() {
        for (net, contained, overlapping) in [
            ("169.254.64.7/32", true, true),
            ("169.254.64.0/18", true, true),
            ("169.254.0.0/16", false, true),
            ("0.0.0.0/0", false, true),
            ("169.254.0.0/18", false, false),
            ("169.254.169.254/32", false, false),
            ("::/0", false, false),
        ] {
            let net: IpNet = net.parse().unwrap();
            assert_eq!(
                (contains(&net), overlaps(&net)),
                (contained, overlapping),
                "{net}"
            );
        }
    }
}
