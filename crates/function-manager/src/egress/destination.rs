//! Addresses of a host. A name is resolved once, and its addresses are checked. The connection uses
//! a checked address, so that a second lookup cannot return another one.

use super::EgressSettings;
use super::allow_list::is_name;
use jiffy_engine_api::NetworkRules;
use jiffy_network::{EgressPolicy, HostReachability};
use jiffy_proto::function::EgressFailure;
use nix::ifaddrs::getifaddrs;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

/// Maximum number of addresses that are tried for a host.
const MAX_ADDRESSES: usize = 4;
/// Timeout of a lookup.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a connection attempt to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Rules for addresses.
#[derive(Debug)]
pub(super) struct Destinations {
    policy: EgressPolicy,
    settings: EgressSettings,
}

impl Destinations {
    pub(super) fn new(settings: EgressSettings) -> Result<Self, jiffy_network::RulesError> {
        // The same rules and address ranges apply to the networks of sandboxes.
        let reach = HostReachability {
            granted: settings.granted.clone(),
            ipv6: true,
            ..HostReachability::default()
        };
        let rules = NetworkRules {
            allow_out: settings.granted.iter().map(ToString::to_string).collect(),
            ..NetworkRules::default()
        };
        let policy = EgressPolicy::new(&rules, &reach)?;
        Ok(Self { policy, settings })
    }

    /// Returns whether functions may reach `address`: a public address, or an address that the
    /// operator granted. An address of this host (`own`) must be granted even if it is public.
    fn permits(&self, address: IpAddr, own: &[IpAddr]) -> bool {
        let granted = self.settings.granted.iter();
        let is_granted = granted.clone().any(|net| net.contains(&address));
        self.policy.allows(address) && (is_granted || !own.contains(&address))
    }

    /// Connects to a permitted address of `host`.
    pub(super) async fn connect(&self, host: &str, port: u16) -> Result<TcpStream, EgressFailure> {
        let addresses = self.resolve(host, port).await?;
        // An IPv4-mapped IPv6 address reaches the same host as its IPv4 address.
        let addresses = addresses.into_iter().map(|address| address.to_canonical());
        // Read the addresses for each connection, because they change.
        let own = own_addresses();
        let permitted = addresses.filter(|address| self.permits(*address, &own));
        // This failure is returned if no address is permitted, and the last failure otherwise.
        let mut failure = EgressFailure::ProhibitedAddress;
        for address in permitted.take(MAX_ADDRESSES) {
            let address = SocketAddr::new(address, port);
            match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(_)) => failure = EgressFailure::Refused,
                Err(_) => failure = EgressFailure::Timeout,
            }
        }
        Err(failure)
    }

    /// Returns the addresses of a host, which are not checked yet.
    async fn resolve(&self, host: &str, port: u16) -> Result<Vec<IpAddr>, EgressFailure> {
        // The check of the address follows in `connect`, as for a resolved name.
        if let Ok(address) = host.parse() {
            return Ok(vec![address]);
        }
        let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        if !is_name(&name) {
            return Err(EgressFailure::NotFound);
        }
        let overrides = self.settings.names.as_ref();
        if let Some(addresses) = overrides.and_then(|names| names.addresses(&name)) {
            return Ok(addresses);
        }
        let addresses = timeout(LOOKUP_TIMEOUT, lookup_host((name, port))).await;
        match addresses {
            Ok(Ok(addresses)) => Ok(addresses.map(|address| address.ip()).collect()),
            Ok(Err(_)) => Err(EgressFailure::NotFound),
            Err(_) => Err(EgressFailure::Timeout),
        }
    }
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

    /// Returns whether a function may connect to `address`, if the host's owner grants these
    /// networks.
    fn permits(granted: &[&str], address: &str) -> bool {
        let settings = EgressSettings {
            granted: granted.iter().map(|net| net.parse().unwrap()).collect(),
            ..EgressSettings::default()
        };
        let address: IpAddr = address.parse().unwrap();
        let own = ["198.41.0.4".parse().unwrap()];
        let destinations = Destinations::new(settings).unwrap();
        destinations.permits(address.to_canonical(), &own)
    }

    #[test]
    fn only_public_addresses_of_other_hosts_are_permitted() {
        for address in ["1.1.1.1", "2600::1", "::ffff:1.1.1.1"] {
            assert!(permits(&[], address), "{address}");
        }
        for address in [
            "127.0.0.1",
            "127.255.0.1",
            "0.0.0.0",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.0.1",
            "100.64.0.1",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "fd00::1",
            "fe80::1",
            "ff02::1",
            // An address of this host.
            "198.41.0.4",
        ] {
            assert!(!permits(&[], address), "{address}");
        }
        assert!(permits(&["127.0.0.0/8"], "::ffff:127.0.0.1"));
        assert!(!permits(&["127.0.0.0/8"], "169.254.169.254"));
    }
}
