//! Addresses of the host, which sandboxes in rootless mode must not reach.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. In rootless mode, the *router* is the network namespace to which
//! the slots are connected.
//!
//! With root privileges, the host's routing table identifies packets to addresses of the host. In
//! rootless mode, packets leave through a program that opens connections on behalf of sandboxes. To
//! that program, the host's addresses are like any other. Therefore the table in the router's
//! namespace contains the host's addresses and is updated when they change.

use crate::NetError;
use crate::device;
use crate::namespace;
use crate::program;
use crate::slot_layout::table;
use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;

/// Multicast groups of address changes (`RTMGRP_IPV4_IFADDR`, `RTMGRP_IPV6_IFADDR`, rtnetlink(7)).
const ADDRESS_GROUPS: u32 = 0x10 | 0x100;

/// Addresses of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct HostAddresses(BTreeSet<IpAddr>);

impl HostAddresses {
    /// Reads the addresses of this thread's network namespace.
    fn read() -> Result<Self, NetError> {
        let interfaces = getifaddrs().map_err(|e| NetError::host("listing addresses")(e.into()))?;
        let addresses = interfaces.filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))
        });
        Ok(Self(addresses.collect()))
    }

    /// Returns the elements of the set of IPv6 addresses if `ipv6` is true, or of IPv4 addresses,
    /// in the language of `nft`. `None` if the host has no such address.
    fn elements(&self, ipv6: bool) -> Option<String> {
        let of = self.0.iter().filter(|address| address.is_ipv6() == ipv6);
        let words: Vec<String> = of.map(IpAddr::to_string).collect();
        (!words.is_empty()).then(|| format!("{{ {} }}", words.join(", ")))
    }

    /// Returns the sets for a table that rejects packets to the addresses.
    pub fn sets(&self) -> String {
        let set = |name: &str, kind: &str, elements: Option<String>| {
            let elements = elements.map_or(String::new(), |e| format!(" elements = {e};"));
            format!("  set {name} {{ type {kind};{elements} }}\n")
        };
        set("own4", "ipv4_addr", self.elements(false))
            + &set("own6", "ipv6_addr", self.elements(true))
    }

    /// Returns the rules that use these sets.
    pub fn rules() -> &'static str {
        "    ip daddr @own4 goto refuse\n    ip6 daddr @own6 goto refuse\n"
    }

    /// Returns the script that replaces the sets' elements in the table of `tag`.
    fn script(&self, tag: &str) -> String {
        let table = table(tag);
        let mut text = String::new();
        for (name, elements) in [
            ("own4", self.elements(false)),
            ("own6", self.elements(true)),
        ] {
            text += &format!("flush set inet {table} {name}\n");
            if let Some(elements) = elements {
                text += &format!("add element inet {table} {name} {elements}\n");
            }
        }
        text
    }
}

/// Socket that receives notifications of address changes.
#[derive(Debug)]
pub(crate) struct AddressChanges(OwnedFd);

impl AddressChanges {
    /// Subscribes in the network namespace of this thread and reads its current addresses.
    pub fn subscribe() -> Result<(Self, HostAddresses), NetError> {
        let failed = |e: Errno| NetError::host("listening for changes of addresses")(e.into());
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRoute,
        )
        .map_err(failed)?;
        // Subscribe before reading, so that no change in between is lost.
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, ADDRESS_GROUPS)).map_err(failed)?;
        Ok((Self(socket), HostAddresses::read()?))
    }

    /// Starts a thread that updates the table of `tag`, which currently contains the addresses in
    /// `known`.
    pub fn follow(self, tag: &str, known: HostAddresses) -> Result<AddressFollower, NetError> {
        let failed = || NetError::host("following changes of addresses");
        let (stop, stopped) = UnixStream::pair().map_err(failed())?;
        let tag = tag.to_owned();
        let thread = thread::Builder::new()
            .name("addresses".to_owned())
            .spawn(move || self.run(&tag, known, &stopped))
            .map_err(failed())?;
        Ok(AddressFollower {
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Thread function: updates the table until the other end of `stopped` is closed.
    fn run(&self, tag: &str, mut known: HostAddresses, stopped: &UnixStream) {
        let mut buffer = [0; 8192];
        loop {
            let fd = |fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            };
            let mut fds = [fd(self.0.as_raw_fd()), fd(stopped.as_raw_fd())];
            // SAFETY: the array has two elements and lives through the call.
            let count = unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) };
            let error = Errno::last();
            // Exit when the other end of `stopped` is closed.
            if fds[1].revents != 0 {
                return;
            }
            if count < 0 && error != Errno::EINTR {
                tracing::error!(
                    %error, "cannot follow the host's addresses: disconnecting sandboxes"
                );
                // Later addresses would not be blocked. An error here cannot be handled further.
                let _ = namespace::outside(disconnect);
                return;
            }
            // Discard the messages: the addresses are read again, so neither the content nor lost
            // messages matter.
            while recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT).is_ok_and(|n| n > 0)
            {
            }
            let now = HostAddresses::read();
            if now.as_ref().is_ok_and(|now| *now == known) {
                continue;
            }
            // This thread is in the namespace with the host's addresses. The table is in the
            // router's namespace, which `outside` enters.
            let done = now.and_then(|now| {
                namespace::outside(|| program::nft(&now.script(tag)))?;
                Ok(now)
            });
            match done {
                Ok(now) => known = now,
                Err(e) => {
                    tracing::error!(
                        error = %e, "cannot block the host's addresses: disconnecting sandboxes"
                    );
                    // Sandboxes must not reach an address that the table does not block. An error
                    // here cannot be handled further.
                    let _ = namespace::outside(disconnect);
                    return;
                }
            }
        }
    }
}

/// Switches off all uplinks of this thread's network namespace, but not the devices of slots
/// (`jf*`) and not the loopback device.
fn disconnect() -> Result<(), NetError> {
    let names = device::names().map_err(NetError::host("listing network devices"))?;
    for name in names
        .iter()
        .filter(|name| !name.starts_with("jf") && *name != "lo")
    {
        device::switch(name, false).map_err(NetError::host(format!("switching {name} off")))?;
    }
    Ok(())
}

/// Thread that updates the table. Dropping this value stops it.
#[derive(Debug)]
pub(crate) struct AddressFollower {
    /// End of a socket pair. The thread exits when this end is closed.
    stop: Option<UnixStream>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Drop for AddressFollower {
    fn drop(&mut self) {
        // Closing this end makes the thread's poll return.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was logged by the panic hook; there is nothing to clean up.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_addresses_are_refused_by_version() {
        let addresses = ["192.0.2.1", "11.0.0.2", "2001:db8::1"];
        let own = HostAddresses(addresses.iter().filter_map(|a| a.parse().ok()).collect());
        assert_eq!(
            own.sets(),
            "  set own4 { type ipv4_addr; elements = { 11.0.0.2, 192.0.2.1 }; }\n  \
             set own6 { type ipv6_addr; elements = { 2001:db8::1 }; }\n"
        );
        let script = own.script("abcdef");
        assert!(
            script.contains("flush set inet jiffy_abcdef own4\nadd element inet"),
            "{script}"
        );
        assert!(!HostAddresses::default().script("abcdef").contains("add"));
    }

    #[test]
    fn this_hosts_loopback_is_among_its_addresses() {
        let (_changes, own) = AddressChanges::subscribe().unwrap_or_else(|e| unreachable!("{e}"));
        assert!(own.0.iter().any(IpAddr::is_loopback), "{own:?}");
    }
}
