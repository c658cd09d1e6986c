//! Verification of the secret that a client presents.

use super::{COLUMNS, Key, KeyError, Keys, MAX_NETWORKS, hash, key, stored};
use ipnet::IpNet;
use jiffy_engine_api::now_ms;
use rusqlite::{OptionalExtension, params};
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

impl Keys {
    /// Verifies the secret of a client at `from`. `None` if the client's address is unknown.
    pub fn check(&self, secret: &str, from: Option<IpAddr>) -> Result<Verdict, KeyError> {
        let now = now_ms();
        let found = {
            let connection = self.connection();
            let read = || -> rusqlite::Result<Option<Key>> {
                // After a rotation, the previous secret remains valid for a while.
                let query = format!(
                    "SELECT {COLUMNS} FROM keys WHERE hash = ?1
                        OR (previous_hash = ?1 AND previous_until_ms > ?2)"
                );
                let mut statement = connection.prepare_cached(&query)?;
                let found = statement.query_row(params![hash(secret), stored(now)], key);
                found.optional()
            };
            read().map_err(|e| self.failed(e))?
        };
        let Some(found) = found else {
            return Ok(Verdict::Unknown);
        };
        // In this order: a revocation is more informative than an expiry.
        if found.revoked_ms.is_some() {
            return Ok(Verdict::Revoked);
        }
        if found.is_expired() {
            return Ok(Verdict::Expired);
        }
        if !allows(&found.addresses, from) {
            return Ok(Verdict::Elsewhere);
        }
        if self.should_record_use(&found.id) {
            // Only log the error: the key is valid nevertheless.
            let recorded = self.connection().execute(
                "UPDATE keys SET used_ms = ?2 WHERE id = ?1",
                params![found.id, stored(now)],
            );
            if let Err(e) = recorded {
                tracing::warn!(key = %found.id, error = %e, "cannot record the use of a key");
            }
        }
        Ok(Verdict::Valid(Box::new(found)))
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
