//! [`ResolvedAddresses`]: the addresses that the DNS server returned to one guest. Rules for names
//! with a port other than 80 and 443 permit connections to these addresses, because such
//! connections need not contain the name of the host.
//!
//! The *epoch* is a number that changes when all addresses are removed, for example by a rollback
//! of the guest. An answer to a question of an earlier epoch is not recorded.

use crate::host_names::normalize;
use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Minimum time for which an address is permitted. Programs resolve a name and connect later, and
/// many names have a TTL of a few seconds.
const MIN_TTL: Duration = Duration::from_secs(60);
/// Maximum time for which an address is permitted.
const MAX_TTL: Duration = Duration::from_secs(3600);
/// Maximum number of addresses of one name. A further address displaces the first one to expire.
const MAX_PER_NAME: usize = 64;
/// Maximum number of addresses of one guest. Further ones displace the name that was resolved least
/// recently.
const MAX_ADDRESSES: usize = 1024;
/// Maximum number of aliases (CNAME) between a name and its addresses.
const MAX_ALIASES: usize = 16;

/// Addresses that the DNS server returned to one guest.
#[derive(Debug)]
pub(crate) struct ResolvedAddresses {
    /// Addresses by normalized name.
    names: Mutex<HashMap<String, ResolvedName>>,
    /// Number of times that all addresses were removed. An answer is recorded only if the number
    /// has not changed since the question.
    epoch: watch::Sender<u64>,
}

/// Addresses of one name.
#[derive(Debug)]
struct ResolvedName {
    /// Time of the last answer.
    resolved: Instant,
    /// Addresses with the times at which they expire.
    addresses: Vec<(IpAddr, Instant)>,
}

impl Default for ResolvedAddresses {
    fn default() -> Self {
        Self {
            names: Mutex::default(),
            epoch: watch::Sender::new(0),
        }
    }
}

impl ResolvedAddresses {
    /// Returns a receiver of the epoch, which changes when all addresses are removed.
    pub fn epoch(&self) -> watch::Receiver<u64> {
        self.epoch.subscribe()
    }

    /// Removes all addresses: the guest was rolled back, or was terminated.
    pub fn clear(&self) {
        let mut names = self.names.lock();
        names.clear();
        // Change the epoch while the lock is held: `record` compares it under the lock.
        self.epoch.send_modify(|epoch| *epoch += 1);
    }

    /// Records the addresses in `answer` for `name`, unless the epoch is no longer `epoch`.
    pub fn record(&self, epoch: u64, name: &str, answer: &Message, now: Instant) {
        let found = addresses_in(answer);
        let mut names = self.names.lock();
        if found.is_empty() || *self.epoch.borrow() != epoch {
            return;
        }
        remove_expired(&mut names, now);
        let of_name = names.entry(normalize(name)).or_insert(ResolvedName {
            resolved: now,
            addresses: Vec::new(),
        });
        of_name.resolved = now;
        for (address, ttl) in found {
            let expires = now + ttl.clamp(MIN_TTL, MAX_TTL);
            of_name.add(address, expires);
        }
        let mut total: usize = names.values().map(|name| name.addresses.len()).sum();
        while total > MAX_ADDRESSES {
            let oldest = names.iter().min_by_key(|(_, name)| name.resolved);
            let Some(oldest) = oldest.map(|(name, _)| name.clone()) else {
                return;
            };
            total -= names.remove(&oldest).map_or(0, |name| name.addresses.len());
        }
    }

    /// Returns the names of which `address` is an unexpired address, the most recently resolved
    /// first.
    pub fn names_of(&self, address: IpAddr, now: Instant) -> Vec<String> {
        let names = self.names.lock();
        let is_address = |(own, expires): &(IpAddr, Instant)| *own == address && *expires > now;
        let mut found: Vec<(&String, Instant)> = names
            .iter()
            .filter(|(_, name)| name.addresses.iter().any(is_address))
            .map(|(text, name)| (text, name.resolved))
            .collect();
        found.sort_by_key(|(_, resolved)| std::cmp::Reverse(*resolved));
        found.into_iter().map(|(text, _)| text.clone()).collect()
    }
}

/// Removes expired addresses, and names without addresses.
fn remove_expired(names: &mut HashMap<String, ResolvedName>, now: Instant) {
    names.retain(|_, name| {
        name.addresses.retain(|(_, expires)| *expires > now);
        !name.addresses.is_empty()
    });
}

impl ResolvedName {
    /// Permits an address until `expires`. At the maximum, replaces the address that expires first.
    fn add(&mut self, address: IpAddr, expires: Instant) {
        if let Some((_, own)) = self.addresses.iter_mut().find(|(own, _)| *own == address) {
            // An earlier answer may permit the address for longer.
            *own = expires.max(*own);
            return;
        }
        if self.addresses.len() >= MAX_PER_NAME {
            let first = self.addresses.iter().enumerate();
            let first = first.min_by_key(|(_, (_, expires))| *expires);
            if let Some((at, _)) = first {
                self.addresses.swap_remove(at);
            }
        }
        self.addresses.push((address, expires));
    }
}

/// Returns the addresses of the name in the question of `answer`, with the minimum TTL of the
/// records that lead to each. Records of other names are ignored.
fn addresses_in(answer: &Message) -> Vec<(IpAddr, Duration)> {
    let [query] = answer.queries.as_slice() else {
        return Vec::new();
    };
    let is_for_addresses = matches!(query.query_type(), RecordType::A | RecordType::AAAA);
    if answer.metadata.response_code != ResponseCode::NoError || !is_for_addresses {
        return Vec::new();
    }
    let records = |name: Name| {
        let is_of_name =
            move |record: &&Record| record.name == name && record.dns_class == DNSClass::IN;
        answer.answers.iter().filter(is_of_name)
    };
    let mut found = Vec::new();
    let (mut name, mut ttl) = (query.name().clone(), u32::MAX);
    for _ in 0..=MAX_ALIASES {
        let mut alias = None;
        for record in records(name.clone()) {
            let record_ttl = ttl.min(record.ttl);
            let address = match &record.data {
                RData::A(address) => IpAddr::V4(address.0),
                RData::AAAA(address) => IpAddr::V6(address.0),
                RData::CNAME(target) => {
                    alias = Some((target.0.clone(), record_ttl));
                    continue;
                }
                _ => continue,
            };
            found.push((address, Duration::from_secs(record_ttl.into())));
        }
        match alias {
            Some((target, alias_ttl)) => (name, ttl) = (target, alias_ttl),
            None => break,
        }
    }
    // A name has at most this number of addresses, so that further ones would displace the first.
    found.truncate(MAX_PER_NAME);
    found
}

#[cfg(test)]
#[path = "resolved_addresses_tests.rs"]
mod tests;
