//! Changes of links, addresses, neighbours and routes over rtnetlink, in place of running `ip`.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::NetError;
use crate::netlink_batch::NetlinkBatch;
use ipnet::Ipv4Net;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NetlinkSerializable,
};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute,
    LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::sys::socket::SockProtocol;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Index of the loopback device of every network namespace.
pub(crate) const LOOPBACK_INDEX: u32 = 1;

/// End of a veth pair.
#[derive(Debug)]
pub(crate) struct VethEnd<'a> {
    pub name: &'a str,
    /// `None` for a random address.
    pub mac: Option<[u8; 6]>,
    pub mtu: u32,
}

impl VethEnd<'_> {
    /// Returns the attributes that create this end.
    fn attributes(&self) -> Vec<LinkAttribute> {
        let mut attributes = vec![
            LinkAttribute::IfName(self.name.to_owned()),
            LinkAttribute::Mtu(self.mtu),
            // Without these numbers, the kernel creates queues for each processor, with files and
            // memory. A pair sends without locks, so a single queue has the same throughput.
            LinkAttribute::NumTxQueues(1),
            LinkAttribute::NumRxQueues(1),
        ];
        attributes.extend(self.mac.map(|mac| LinkAttribute::Address(mac.to_vec())));
        attributes
    }
}

/// Changes of a link. `None` and `false` leave the property unchanged.
#[derive(Debug, Default)]
pub(crate) struct LinkChange {
    pub mac: Option<[u8; 6]>,
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// True to prevent the kernel from assigning a link-local IPv6 address.
    pub no_link_local: bool,
    /// True to switch the link on.
    pub up: bool,
}

/// Changes of links, addresses, neighbours and routes that are sent in one datagram.
#[derive(Debug, Default)]
pub(crate) struct RouteBatch(NetlinkBatch);

/// Returns the address family of an address.
fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

/// Returns a route to `to` on a link in the main table, without type and scope.
fn route(index: u32, to: Ipv4Net) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = AddressFamily::Inet;
    message.header.destination_prefix_length = to.prefix_len();
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = RouteProtocol::Boot;
    message.attributes = vec![
        RouteAttribute::Destination(IpAddr::from(to.network()).into()),
        RouteAttribute::Oif(index),
    ];
    message
}

impl RouteBatch {
    /// Makes the changes in the network namespace of this thread. Each change must be acknowledged.
    /// Returns the error of the first failed change.
    pub fn send(&self) -> Result<(), NetError> {
        self.0.send(SockProtocol::NetlinkRoute)
    }

    /// Adds a request that the kernel must acknowledge. `what` describes the operation in errors.
    fn push(&mut self, what: String, flags: u16, message: &RouteNetlinkMessage) {
        let mut body = vec![0; message.buffer_len()];
        message.serialize(&mut body);
        let flags = NLM_F_ACK | flags;
        self.0.push(what, message.message_type(), flags, &body);
    }

    /// Adds a request that creates an object.
    fn add(&mut self, what: String, message: &RouteNetlinkMessage) {
        // An existing object is an error: namespaces of slots are new.
        self.push(what, NLM_F_CREATE | NLM_F_EXCL, message);
    }

    /// Changes the link with this index.
    pub fn set_link(&mut self, index: u32, change: &LinkChange) {
        let mut attributes: Vec<LinkAttribute> = Vec::new();
        attributes.extend(change.mac.map(|mac| LinkAttribute::Address(mac.to_vec())));
        attributes.extend(change.mtu.map(LinkAttribute::Mtu));
        if change.no_link_local {
            let inet6 = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
            let inet6 = AfSpecUnspec::Inet6(vec![inet6]);
            attributes.push(LinkAttribute::AfSpecUnspec(vec![inet6]));
        }
        if !attributes.is_empty() {
            let mut message = LinkMessage::default();
            message.header.index = index;
            message.attributes = attributes;
            let message = RouteNetlinkMessage::NewLink(message);
            self.push(format!("changing link {index}"), 0, &message);
        }
        if change.up {
            // The link is switched on in a separate request. With a single request, the kernel
            // would switch the link on before it applies the attributes, and would assign a
            // link-local address.
            let mut message = LinkMessage::default();
            message.header.index = index;
            message.header.flags = LinkFlags::Up;
            // Change no other flag.
            message.header.change_mask = LinkFlags::Up;
            let message = RouteNetlinkMessage::NewLink(message);
            self.push(format!("switching link {index} on"), 0, &message);
        }
    }

    /// Creates a veth pair: `own`, with index `index`, in the namespace of this thread, and `peer`
    /// in `peer_namespace`.
    pub fn add_veth(
        &mut self,
        index: u32,
        own: &VethEnd<'_>,
        peer: &VethEnd<'_>,
        peer_namespace: BorrowedFd<'_>,
    ) {
        let mut other = LinkMessage::default();
        other.attributes = peer.attributes();
        let namespace = LinkAttribute::NetNsFd(peer_namespace.as_raw_fd());
        other.attributes.push(namespace);
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.attributes = own.attributes();
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(other))),
        ]));
        let what = format!("creating the veth pair {} and {}", own.name, peer.name);
        self.add(what, &RouteNetlinkMessage::NewLink(message));
    }

    /// Adds an address to a link. An IPv6 address is usable immediately (no duplicate address
    /// detection).
    pub fn add_address(&mut self, index: u32, address: IpAddr, prefix_length: u8) {
        let mut message = AddressMessage::default();
        message.header.family = family(address);
        message.header.prefix_len = prefix_length;
        message.header.index = index;
        // No other host is on the link, so duplicates are impossible.
        if address.is_ipv6() {
            message.header.flags = AddressHeaderFlags::Nodad;
        }
        message.attributes = vec![
            AddressAttribute::Local(address),
            AddressAttribute::Address(address),
        ];
        let what = format!("adding address {address}/{prefix_length} to link {index}");
        self.add(what, &RouteNetlinkMessage::NewAddress(message));
    }

    /// Adds a permanent neighbour, which needs no resolution.
    pub fn add_neighbour(&mut self, index: u32, address: IpAddr, mac: [u8; 6]) {
        let mut message = NeighbourMessage::default();
        message.header.family = family(address);
        message.header.ifindex = index;
        message.header.state = NeighbourState::Permanent;
        let destination = match address {
            IpAddr::V4(v4) => NeighbourAddress::Inet(v4),
            IpAddr::V6(v6) => NeighbourAddress::Inet6(v6),
        };
        message.attributes = vec![
            NeighbourAttribute::Destination(destination),
            NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
        ];
        let what = format!("adding neighbour {address} to link {index}");
        self.add(what, &RouteNetlinkMessage::NewNeighbour(message));
    }

    /// Adds a default route.
    pub fn add_default_route(&mut self, index: u32, gateway: IpAddr) {
        let mut message = RouteMessage::default();
        message.header.address_family = family(gateway);
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        // The protocol of routes that `ip` adds.
        message.header.protocol = RouteProtocol::Boot;
        message.header.kind = RouteType::Unicast;
        message.attributes = vec![
            RouteAttribute::Gateway(gateway.into()),
            RouteAttribute::Oif(index),
        ];
        let what = format!("adding a default route via {gateway} on link {index}");
        self.add(what, &RouteNetlinkMessage::NewRoute(message));
    }

    /// Adds a route to `to` on a link, directly or via `gateway`. The gateway need not be in a
    /// network of the link. Replaces an existing route to `to`.
    pub fn replace_route(&mut self, index: u32, to: Ipv4Net, gateway: Option<Ipv4Addr>) {
        let mut message = route(index, to);
        message.header.kind = RouteType::Unicast;
        if let Some(gateway) = gateway {
            message.header.flags = RouteFlags::Onlink;
            let gateway = RouteAttribute::Gateway(IpAddr::from(gateway).into());
            message.attributes.push(gateway);
        } else {
            message.header.scope = RouteScope::Link;
        }
        let what = format!("adding a route to {to} on link {index}");
        let message = RouteNetlinkMessage::NewRoute(message);
        self.push(what, NLM_F_CREATE | NLM_F_REPLACE, &message);
    }

    /// Makes this namespace receive the packets to addresses in `to` for which it has no other
    /// route.
    pub fn add_local_route(&mut self, to: Ipv4Net) {
        let mut message = route(LOOPBACK_INDEX, to);
        message.header.kind = RouteType::Local;
        message.header.scope = RouteScope::Host;
        let what = format!("adding a local route to {to}");
        self.add(what, &RouteNetlinkMessage::NewRoute(message));
    }

    /// Sets the group of a link.
    pub fn set_group(&mut self, index: u32, group: u32) {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.attributes = vec![LinkAttribute::Group(group)];
        let message = RouteNetlinkMessage::NewLink(message);
        self.push(format!("putting link {index} into a group"), 0, &message);
    }

    /// Removes all links of a group at once.
    pub fn delete_group(&mut self, group: u32) {
        let mut message = LinkMessage::default();
        message.attributes = vec![LinkAttribute::Group(group)];
        let message = RouteNetlinkMessage::DelLink(message);
        self.push(
            format!("removing the links of group {group:#x}"),
            0,
            &message,
        );
    }

    /// Removes a link.
    pub fn delete_link(&mut self, index: u32) {
        let mut message = LinkMessage::default();
        message.header.index = index;
        let message = RouteNetlinkMessage::DelLink(message);
        self.push(format!("removing link {index}"), 0, &message);
    }
}
