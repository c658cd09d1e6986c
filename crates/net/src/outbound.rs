//! Connections that the daemon itself makes from a slot, under the policy of its guests.

use crate::error::NetError;
use crate::namespace;
use crate::network::{Lease, Network};
use crate::upstream;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use std::net::IpAddr;
use std::os::fd::OwnedFd;

impl Network {
    /// Addresses of a name, asked of the host's name servers.
    pub async fn lookup(&self, name: &str) -> Vec<IpAddr> {
        let (policy, upstreams) = self.usual();
        upstream::addresses(name, &policy.upstreams(upstreams), policy.version6()).await
    }

    /// Tells if a slot without rules of its own reaches an address.
    pub fn permits(&self, address: IpAddr) -> bool {
        self.usual().0.allows(address)
    }
}

impl Lease {
    /// A TCP socket in the guest's own network namespace: everything that is sent with it passes the
    /// tables of slot and host. It does not block.
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
