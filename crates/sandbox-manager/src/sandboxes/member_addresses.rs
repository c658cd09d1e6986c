//! [`MemberAddresses`]: addresses of sandboxes in private networks, unique per owner and network. A
//! *private network* connects sandboxes of one owner with each other.

use super::{OperationError, Sandboxes};
use crate::sandbox::Sandbox;
use jiffy_api_types::SandboxState;
use jiffy_engine_api::MEMBER_ADDRESSES;
use parking_lot::Mutex;
use smol_str::SmolStr;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// Owner and name of a network. The owner is `None` for the host's owner.
type NetworkKey = (Option<SmolStr>, SmolStr);

/// Addresses of the sandboxes that are not killed, by network.
#[derive(Debug, Default)]
pub(crate) struct MemberAddresses(Mutex<BTreeMap<NetworkKey, BTreeMap<Ipv4Addr, SmolStr>>>);

/// Returns the network and the address of a sandbox that is not killed.
fn claimed(record: &Sandbox) -> Option<(NetworkKey, Ipv4Addr)> {
    let network = &record.settings.network;
    let name = network.join.as_deref()?;
    let address = network.address.as_deref()?.parse().ok()?;
    let owner = record.settings.owner.as_deref().map(SmolStr::new);
    let is_alive = record.state != SandboxState::Killed;
    is_alive.then(|| ((owner, SmolStr::new(name)), address))
}

impl<'a> FromIterator<(&'a SmolStr, &'a Sandbox)> for MemberAddresses {
    /// Builds the index. The addresses must be unique per network.
    fn from_iter<T: IntoIterator<Item = (&'a SmolStr, &'a Sandbox)>>(records: T) -> Self {
        let mut networks: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for (id, record) in records {
            if let Some((network, address)) = claimed(record) {
                networks
                    .entry(network)
                    .or_default()
                    .insert(address, id.clone());
            }
        }
        Self(Mutex::new(networks))
    }
}

impl MemberAddresses {
    /// Assigns a free address in the private network `name` of `owner` to the new sandbox `id`. The
    /// search starts at an address that depends on the id, so that the address of a sandbox that
    /// has ended is not used again soon.
    ///
    /// # Errors
    /// Fails if the network has no free address. Paused sandboxes retain their addresses.
    pub fn claim(
        &self,
        owner: Option<&str>,
        name: &str,
        id: &str,
    ) -> Result<Ipv4Addr, OperationError> {
        let (first, last) = (*MEMBER_ADDRESSES.start(), *MEMBER_ADDRESSES.end());
        let count = last - first + 1;
        // Ids are random, so that this simple hash distributes them evenly.
        let hash = |hash: u32, byte| hash.wrapping_mul(31).wrapping_add(u32::from(byte));
        let start = id.bytes().fold(0, hash) % count;
        let mut networks = self.0.lock();
        let key = (owner.map(SmolStr::new), SmolStr::new(name));
        // An entry that this adds receives an address below: a network without members has a free
        // one.
        let used = networks.entry(key).or_default();
        let mut tried = (0..count).map(|i| Ipv4Addr::from(first + (start + i) % count));
        let free = tried.find(|address| !used.contains_key(address));
        let free = free.ok_or_else(|| {
            OperationError::Network(format!(
                "the private network `{name}` has no free address: kill sandboxes that are not \
                 needed, also paused ones"
            ))
        })?;
        used.insert(free, SmolStr::new(id));
        Ok(free)
    }

    /// Updates the index for a changed or removed record. A new address must be claimed before.
    pub fn change(&self, id: &SmolStr, before: &Sandbox, now: Option<&Sandbox>) {
        // A sandbox without a network needs no lock.
        let Some((network, address)) = claimed(before) else {
            return;
        };
        if now
            .and_then(claimed)
            .is_some_and(|now| now == (network.clone(), address))
        {
            return;
        }
        let mut networks = self.0.lock();
        if let Some(used) = networks.get_mut(&network)
            && used.get(&address) == Some(id)
        {
            used.remove(&address);
            if used.is_empty() {
                networks.remove(&network);
            }
        }
    }
}

impl Sandboxes {
    /// Assigns an address to a new sandbox that joins a private network. A clone does not inherit
    /// the address of its parent. Releases the name of the sandbox on failure.
    pub(super) fn claim_address(&self, record: &mut Sandbox) -> Result<(), OperationError> {
        let Some(network) = &record.settings.network.join else {
            return Ok(());
        };
        let (owner, indexes) = (&record.settings.owner, &self.0.indexes);
        let address = indexes.members.claim(owner.as_deref(), network, &record.id);
        let address = address.inspect_err(|_| {
            if let Some(name) = &record.name {
                indexes.names.release(owner, name, &record.id);
            }
        })?;
        record.settings.network.address = Some(address.to_string());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn addresses_are_unique_in_a_network_until_it_is_full() {
        let addresses = MemberAddresses::default();
        let count = MEMBER_ADDRESSES.count();
        let claimed: BTreeSet<Ipv4Addr> = (0..count)
            .map(|i| addresses.claim(None, "lab", &format!("id{i}")).unwrap())
            .collect();
        assert_eq!(claimed.len(), count);
        assert!(
            claimed
                .iter()
                .all(|a| MEMBER_ADDRESSES.contains(&a.to_bits()))
        );
        let full = addresses.claim(None, "lab", "one-more").unwrap_err();
        assert!(matches!(full, OperationError::Network(_)), "{full}");
        // Another network, and the network of another owner, have all addresses.
        let first = addresses.claim(None, "other", "id0").unwrap();
        assert_eq!(addresses.claim(Some("key"), "lab", "id0").unwrap(), first);
    }
}
