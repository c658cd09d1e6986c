//! Connections of the daemon itself from a slot, under the policy of its guests.

use crate::error::NetError;
use crate::namespace;
use crate::network::Network;
use crate::slot_lease::SlotLease;
use crate::upstream;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use std::net::IpAddr;
use std::os::fd::OwnedFd;

impl Network {
    /// Addresses of a name, from the host's name servers.
    pub async fn lookup(&self, name: &str) -> Vec<IpAddr> {
        let (policy, upstreams) = self.usual();
        upstream::addresses(name, &policy.upstreams(upstreams), policy.ipv6()).await
    }

    /// Returns true if a slot without rules of its own reaches an address.
    pub fn permits(&self, address: IpAddr) -> bool {
        self.usual().0.allows(address)
    }
}

impl SlotLease {
    /// A non-blocking TCP socket in the guest's own network namespace: all its packets pass the
    /// tables of slot and host.
    pub fn tcp_socket(&self, ipv6: bool) -> Result<OwnedFd, NetError> {
        let family = match ipv6 {
            true => AddressFamily::Inet6,
            false => AddressFamily::Inet,
        };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        namespace::enter(&self.guest_name(), || {
            socket(family, SockType::Stream, flags, SockProtocol::Tcp)
                .map_err(|e| NetError::host("making a socket in a slot")(e.into()))
        })
    }
}
