//! Connections of the daemon from a slot, under the policy of its guest.

use crate::error::NetError;
use crate::namespace;
use crate::network::Network;
use crate::slot_lease::SlotLease;
use crate::upstream;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use std::net::IpAddr;
use std::os::fd::OwnedFd;

impl Network {
    /// Resolves a name with the host's name servers.
    pub async fn lookup(&self, name: &str) -> Vec<IpAddr> {
        let (policy, upstreams) = self.usual();
        upstream::addresses(name, &policy.upstreams(upstreams), policy.ipv6()).await
    }

    /// Returns true if a slot without rules of its own can reach `address`.
    pub fn permits(&self, address: IpAddr) -> bool {
        self.usual().0.allows(address)
    }
}

impl SlotLease {
    /// Opens a non-blocking TCP socket in the guest's network namespace. All its packets pass the
    /// tables of slot and host.
    pub fn tcp_socket(&self, ipv6: bool) -> Result<OwnedFd, NetError> {
        let family = if ipv6 {
            AddressFamily::Inet6
        } else {
            AddressFamily::Inet
        };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        namespace::enter(&self.guest_name(), || {
            socket(family, SockType::Stream, flags, SockProtocol::Tcp)
                .map_err(|e| NetError::host("opening a socket in a slot")(e.into()))
        })
    }
}
