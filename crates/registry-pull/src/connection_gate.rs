//! Opens the connections of a puller, which cannot open sockets itself, under the rules of the
//! host.
//!
//! The *puller* is the confined process that downloads images from registries.
//!
//! A *slot* is a network namespace with its devices and rules.

use crate::cancel::Cancel;
use crate::error::PullError;
use crate::proxy::HttpProxy;
use crate::registries::PullSettings;
use crate::registry_address::RegistryAddress;
use crate::socket::{connect_to, open};
use jiffy_engine_api::NetworkRules;
use jiffy_network::{EgressPolicy, HostReachability, Network, NicKind, SlotLease};
use nix::ifaddrs::getifaddrs;
use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;
use tokio::runtime::Handle;

/// Maximum number of addresses that are tried per name.
const MAX_ADDRESSES: usize = 4;
/// Timeout of a name lookup for a slot.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens the connections of one puller:
///
/// 1. To registries that the host's owner allows (`--registry-allow`), and to the registry of an
///    image that the owner pulls: from the host's network, to exactly this host and port.
/// 2. To other hosts: from a network slot of this puller, under the sandboxes' egress rules. The
///    public internet is reachable, but not the host, other sandboxes, or private and link-local
///    ranges.
/// 3. To other hosts without network slots: the host's owner reaches the public internet from the
///    host's network, under the same list of ranges. Connections for API keys are rejected.
///
/// The rules do not apply to connections through the host's HTTP proxy. Only pulls that the host's
/// owner requests use this proxy.
pub struct ConnectionGate {
    /// Hosts that the puller reaches directly from the host's network.
    named: Vec<RegistryAddress>,
    /// True if an API key requested the pull.
    by_key: bool,
    network: Option<(Network, Handle)>,
    /// Network slot of this puller, taken at the first connection that needs it.
    lease: Option<SlotLease>,
    proxy: Option<HttpProxy>,
}

impl ConnectionGate {
    /// Creates the gate of an import from `registry` (`host` or `host:port`).
    pub fn new(pull: &PullSettings, registry: &str) -> Result<Self, PullError> {
        let registries = &pull.registries;
        let requested: Option<RegistryAddress> = registry.parse().ok();
        let mut named = registries.allowed.clone();
        let is_allowed = requested
            .as_ref()
            .is_some_and(|registry| named.contains(registry));
        if !pull.by_key {
            // The host's owner may name any registry, also in a private network.
            named.extend(requested);
        } else if registries.network.is_none() && !is_allowed {
            return Err(PullError::NoNetwork(registry.to_owned()));
        }
        // The proxy may reach private networks, so an API key must not use it.
        let proxy = if pull.by_key {
            None
        } else {
            HttpProxy::from_environment()
        };
        Ok(Self {
            named,
            by_key: pull.by_key,
            network: registries.network.clone(),
            lease: None,
            proxy,
        })
    }

    /// Opens a connection. The error is a message for the host's owner, not for an API key.
    pub(crate) fn connect(
        &mut self,
        host: &str,
        port: u16,
        cancel: &Cancel,
    ) -> Result<TcpStream, String> {
        if let Some(proxy) = self.proxy.as_ref().filter(|p| p.applies_to(host, port)) {
            return proxy.connect(host, port, cancel);
        }
        // Hosts in `named` are exempt from the egress rules, but only with exactly this name and
        // port.
        if self.named.iter().any(|d| d.is(host, port)) {
            return direct(host, port, &|_| true, cancel);
        }
        match &self.network {
            Some((network, handle)) => {
                let (network, handle) = (network.clone(), handle.clone());
                self.through_slot(&network, &handle, host, port, cancel)
            }
            None if self.by_key => Err(format!(
                "{host}:{port} is not allowed: add it to --registry-allow"
            )),
            None => {
                let reach = HostReachability {
                    granted: Vec::new(),
                    ipv6: true,
                    ..HostReachability::default()
                };
                let policy = EgressPolicy::new(&NetworkRules::default(), &reach)
                    .map_err(|e| e.to_string())?;
                let own = own_addresses();
                // The egress rules do not cover public addresses of the host itself.
                let public = |ip: IpAddr| policy.allows(ip) && !own.contains(&ip);
                direct(host, port, &public, cancel)
            }
        }
    }

    /// Connects to a host from a network slot, under the egress rules of sandboxes.
    fn through_slot(
        &mut self,
        network: &Network,
        handle: &Handle,
        host: &str,
        port: u16,
        cancel: &Cancel,
    ) -> Result<TcpStream, String> {
        if self.lease.is_none() {
            // This thread does not run the event loop, so it may block.
            let lease = handle
                .block_on(network.take(NicKind::Veth))
                .map_err(|e| format!("no network slot: {e}"))?;
            lease.open().map_err(|e| format!("no network slot: {e}"))?;
            self.lease = Some(lease);
        }
        let lease = self.lease.as_ref().ok_or("no network slot")?;
        let addresses = match host.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => handle
                .block_on(async {
                    tokio::time::timeout(LOOKUP_TIMEOUT, network.lookup(host)).await
                })
                .map_err(|_| format!("timed out looking up {host}"))?,
        };
        let socket = |ipv6| lease.tcp_socket(ipv6).map_err(|e| e.to_string());
        // The rules of slot and host filter the packets. This check only fails early.
        let permitted = |ip: IpAddr| network.permits(ip);
        connect_to_any(host, port, &addresses, &permitted, &socket, cancel)
    }
}

impl fmt::Debug for ConnectionGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("named", &self.named)
            .field("by_key", &self.by_key)
            .finish_non_exhaustive()
    }
}

/// Connects from the host's network.
pub(crate) fn direct(
    host: &str,
    port: u16,
    permitted: &dyn Fn(IpAddr) -> bool,
    cancel: &Cancel,
) -> Result<TcpStream, String> {
    let addresses = (host, port)
        .to_socket_addrs()
        .map_err(|e| format!("cannot look up {host}: {e}"))?;
    let addresses: Vec<IpAddr> = addresses.map(|a| a.ip()).collect();
    let socket = |ipv6| open(ipv6).map_err(|e| e.to_string());
    connect_to_any(host, port, &addresses, permitted, &socket, cancel)
}

/// Connects to the first address that is permitted and accepts a connection. `socket` opens a
/// socket for IPv6 if its argument is true.
fn connect_to_any(
    host: &str,
    port: u16,
    addresses: &[IpAddr],
    permitted: &dyn Fn(IpAddr) -> bool,
    socket: &dyn Fn(bool) -> Result<std::os::fd::OwnedFd, String>,
    cancel: &Cancel,
) -> Result<TcpStream, String> {
    // Addresses are checked after the lookup, so a name cannot lead to a private address.
    let reachable = addresses.iter().copied().filter(|ip| permitted(*ip));
    let reachable: Vec<IpAddr> = reachable.take(MAX_ADDRESSES).collect();
    let mut last = if addresses.is_empty() {
        format!("{host} has no address")
    } else {
        format!(
            "{host}:{port} is not in the public internet; the host's owner can allow it with --registry-allow"
        )
    };
    for address in reachable {
        if cancel.is_cancelled() {
            break;
        }
        let address = SocketAddr::from((address, port));
        match connect_to(socket(address.is_ipv6())?, address, cancel) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = format!("{address}: {e}"),
        }
    }
    Err(last)
}

/// Returns the addresses of this host.
fn own_addresses() -> Vec<IpAddr> {
    let interfaces = getifaddrs().into_iter().flatten();
    let addresses = interfaces.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))
    });
    addresses.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registries::Registries;
    use std::net::TcpListener;

    /// Returns the gate of a pull from `registry`. `by_key` is true if an API key requests the
    /// pull, and false for the host's owner. `allowed` lists the registries that the host's owner
    /// allows.
    fn gate(by_key: bool, allowed: &[&str], registry: &str) -> Result<ConnectionGate, PullError> {
        let registries = Registries {
            allowed: allowed.iter().map(|d| d.parse().unwrap()).collect(),
            ..Registries::default()
        };
        ConnectionGate::new(&registries.pull(by_key, &Cancel::new().unwrap()), registry)
    }

    #[test]
    fn without_slots_a_key_reaches_allowed_registries_only() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let at = format!("127.0.0.1:{port}");
        let refused = gate(true, &["localhost:1"], &at).unwrap_err();
        assert!(matches!(refused, PullError::NoNetwork(_)), "{refused}");
        let mut gate = gate(true, &[&at], &at).unwrap();
        let cancel = Cancel::new().unwrap();
        assert!(gate.connect("127.0.0.1", port, &cancel).is_ok());
        // The same socket is not allowed under another name.
        for other in ["localhost", "127.0.0.2", "0.0.0.0", "169.254.169.254"] {
            let refused = gate.connect(other, port, &cancel).unwrap_err();
            assert!(refused.contains("--registry-allow"), "{refused}");
        }
    }

    #[test]
    fn the_hosts_owner_reaches_the_registry_it_names_and_no_other_private_address() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut gate = gate(false, &[], &format!("localhost:{port}")).unwrap();
        let cancel = Cancel::new().unwrap();
        assert!(gate.connect("localhost", port, &cancel).is_ok());
        for other in ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1"] {
            let refused = gate.connect(other, port, &cancel).unwrap_err();
            assert!(refused.contains("public internet"), "{refused}");
        }
    }

    #[test]
    fn a_pending_connection_is_cancelled() {
        let cancel = Cancel::new().unwrap();
        // Fill the backlog: the kernel then answers no further connection.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(1).unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let mut held = Vec::new();
        let (other, began) = (cancel.clone(), std::time::Instant::now());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(300));
                other.cancel();
            });
            while let Ok(stream) = connect_to(open(false).unwrap(), address, &cancel) {
                held.push(stream);
            }
        });
        assert!(
            began.elapsed() < Duration::from_secs(5),
            "{:?}",
            began.elapsed()
        );
    }
}
