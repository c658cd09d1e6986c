//! Verification of the secret (API key) that a client presents.
//!
//! Only a hash of the secret is stored.

use super::{Key, KeyError, MAX_NETWORKS};
use ipnet::IpNet;
use jiffy_engine_api::now_ms;
use std::net::IpAddr;

/// Result of a key verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The key is neither revoked nor expired, and may be used from the client's address.
    Valid(Box<Key>),
    /// No key has this secret, or the secret was replaced by a rotation.
    Unknown,
    /// The key was revoked.
    Revoked,
    /// The key has expired.
    Expired,
    /// The key may not be used from the client's address.
    Elsewhere,
}

impl Verdict {
    /// Returns the key if it may be used.
    pub fn valid(self) -> Option<Key> {
        match self {
            Self::Valid(key) => Some(*key),
            _ => None,
        }
    }
}

impl Key {
    /// Returns whether the key has expired.
    pub fn is_expired(&self) -> bool {
        self.expires_ms.is_some_and(|at| at <= now_ms())
    }
}

/// Returns the verdict on a key that has the presented secret.
pub(super) fn verdict(key: Key, from: Option<IpAddr>) -> Verdict {
    // Check the revocation before the expiry, because it is the more informative reason.
    if key.revoked_ms.is_some() {
        Verdict::Revoked
    } else if key.is_expired() {
        Verdict::Expired
    } else if !allows(&key.addresses, from) {
        Verdict::Elsewhere
    } else {
        Verdict::Valid(Box::new(key))
    }
}

/// Returns whether one of `networks` contains `from`. If `networks` is empty, every address is
/// allowed. Otherwise an unknown address is not allowed, and an invalid entry contains no address.
fn allows(networks: &[String], from: Option<IpAddr>) -> bool {
    if networks.is_empty() {
        return true;
    }
    // An IPv4 client on an IPv6 socket has a mapped address.
    let Some(from) = from.map(|ip| ip.to_canonical()) else {
        return false;
    };
    let mut networks = networks.iter().filter_map(|n| n.parse::<IpNet>().ok());
    networks.any(|network| network.contains(&from))
}

/// Returns the given addresses and networks in CIDR notation, with cleared host bits.
pub(super) fn networks(written: &[String]) -> Result<Vec<String>, KeyError> {
    if written.len() > MAX_NETWORKS {
        return Err(KeyError::Networks);
    }
    let network = |text: &String| {
        let network = text.parse::<IpNet>().ok();
        let network = network.or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from));
        let network = network.map(|n| n.trunc().to_string());
        network.ok_or_else(|| KeyError::Network(text.escape_debug().to_string()))
    };
    written.iter().map(network).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_contain_their_addresses_and_no_others() {
        let written = ["10.1.2.3/16", "2001:db8::1", "192.0.2.7"].map(str::to_owned);
        let networks = networks(&written).unwrap();
        assert_eq!(networks, ["10.1.0.0/16", "2001:db8::1/128", "192.0.2.7/32"]);
        let from = |ip: &str| allows(&networks, Some(ip.parse().unwrap()));
        assert!(from("10.1.255.1") && from("2001:db8::1") && from("::ffff:192.0.2.7"));
        assert!(!from("10.2.0.1") && !from("2001:db8::2") && !from("192.0.2.8"));
        assert!(!allows(&networks, None) && allows(&[], None));
        assert!(!allows(&["damaged".to_owned()], Some([10, 1, 0, 1].into())));
        for bad in ["", "10.1", "10.0.0.0/33", "a.example", "0/0"] {
            let refused = super::networks(&[bad.to_owned()]);
            assert!(matches!(refused, Err(KeyError::Network(_))), "{bad}");
        }
        let many = vec!["192.0.2.7".to_owned(); MAX_NETWORKS + 1];
        assert!(matches!(super::networks(&many), Err(KeyError::Networks)));
    }
}
