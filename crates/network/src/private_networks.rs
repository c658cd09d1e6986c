//! [`PrivateNetworks`]: the running members of private networks, by which their names are resolved.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! A *private network* connects sandboxes of one owner, its *members*, and nothing else. It is a
//! network namespace with a link to the slot of each running member (`private_network.rs`).

use crate::guest;
use crate::private_network::NetworkId;
use jiffy_engine_api::NetworkMembership;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::Ipv4Addr;

/// Suffix of the names of members. A member also has its name without the suffix, unless the name
/// contains a dot.
const SUFFIX: &str = ".net.jiffy.internal";

/// Slot of a running sandbox in a network.
#[derive(Debug)]
struct Member {
    /// Number of its slot.
    slot: u32,
    /// Id of the sandbox.
    id: String,
    /// Name of the sandbox in the network.
    name: Option<String>,
}

/// Answer to a question for a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemberLookup {
    /// Address of a member.
    Found(Ipv4Addr),
    /// The name has the suffix of members, but no running member has it.
    Absent,
    /// The name is not a name of a member.
    Foreign,
}

/// Private networks of one data directory.
#[derive(Debug, Default)]
pub(crate) struct PrivateNetworks {
    /// Members by address. While a guest is replaced, its sandbox has two slots, of which the last
    /// one receives the packets. The first one receives them again if the replacement fails.
    members: Mutex<HashMap<NetworkId, BTreeMap<Ipv4Addr, Vec<Member>>>>,
    /// Networks whose namespaces may have no links.
    emptied: Mutex<BTreeSet<NetworkId>>,
    /// Held while links and namespaces are created or removed. Taken before the other locks.
    pub changes: Mutex<()>,
}

/// Splits the name of a question into the name of a member, and whether it had the suffix.
fn split(question: &str) -> (&str, bool) {
    let name = question.strip_suffix('.').unwrap_or(question);
    let at = name.len().checked_sub(SUFFIX.len());
    // Names of questions are ASCII, but `get` also excludes a position inside a character.
    let tail = at.and_then(|at| Some((name.get(..at)?, name.get(at..)?)));
    match tail {
        Some((name, tail)) if tail.eq_ignore_ascii_case(SUFFIX) => (name, true),
        _ => (name, false),
    }
}

impl PrivateNetworks {
    /// Adds networks of an earlier daemon, whose members may have ended meanwhile.
    pub fn add_existing(&self, networks: Vec<NetworkId>) {
        self.emptied.lock().extend(networks);
    }

    /// Returns the networks that may have links of a slot whose network is unknown: a guest that
    /// ended while no daemon was running.
    pub fn unchecked(&self) -> Vec<NetworkId> {
        self.emptied.lock().iter().cloned().collect()
    }

    /// Adds or changes the member in `slot`.
    pub fn set(&self, network: &NetworkId, slot: u32, membership: &NetworkMembership) {
        let member = Member {
            slot,
            id: membership.id.clone(),
            name: membership.name.clone(),
        };
        let mut networks = self.members.lock();
        let members = networks.entry(network.clone()).or_default();
        let slots = members.entry(membership.address).or_default();
        match slots.iter_mut().find(|other| other.slot == slot) {
            Some(known) => *known = member,
            None => slots.push(member),
        }
    }

    /// Removes the member in `slot`.
    pub fn remove(&self, network: &NetworkId, slot: u32, address: Ipv4Addr) {
        let mut networks = self.members.lock();
        if let Some(members) = networks.get_mut(network)
            && let Some(slots) = members.get_mut(&address)
        {
            slots.retain(|member| member.slot != slot);
            if slots.is_empty() {
                members.remove(&address);
            }
            if members.is_empty() {
                networks.remove(network);
            }
        }
        drop(networks);
        self.emptied.lock().insert(network.clone());
    }

    /// Returns the slot that receives the packets to an address.
    pub fn slot(&self, network: &NetworkId, address: Ipv4Addr) -> Option<u32> {
        let networks = self.members.lock();
        let slots = networks.get(network)?.get(&address)?;
        slots.last().map(|member| member.slot)
    }

    /// Removes namespaces of networks without links with `remove`, which returns whether it removed
    /// the namespace.
    pub fn clean(&self, remove: impl Fn(&NetworkId) -> bool) {
        // The list is usually empty: hosts without private networks do nothing here.
        if self.emptied.lock().is_empty() {
            return;
        }
        let _changes = self.changes.lock();
        let emptied = self.emptied.lock().clone();
        for network in emptied {
            // A network that has members again needs no entry: the end of its last member adds the
            // entry again.
            let has_members = self.members.lock().contains_key(&network);
            if has_members || remove(&network) {
                self.emptied.lock().remove(&network);
            }
        }
    }

    /// Resolves the name of a question from the guest in `slot`, a member of `network`. The names
    /// of a member are its name and its id. Names are compared without case; if several members
    /// match, the member with the exact name is preferred. A guest receives the address of its own
    /// interface for its own name, so that its servers can bind to the name.
    pub fn resolve(&self, network: &NetworkId, slot: u32, question: &str) -> MemberLookup {
        let (name, is_qualified) = split(question);
        if !is_qualified && name.contains('.') {
            return MemberLookup::Foreign;
        }
        let networks = self.members.lock();
        let members = networks.get(network).into_iter().flatten();
        let members = members.filter_map(|(address, slots)| Some((address, slots.last()?)));
        let named = members.filter(|(_, member)| {
            let own = member.name.as_deref();
            own.is_some_and(|own| own.eq_ignore_ascii_case(name))
                || member.id.eq_ignore_ascii_case(name)
        });
        // `min_by_key` returns the first of several equal members.
        let found = named.min_by_key(|(_, member)| member.name.as_deref() != Some(name));
        match found {
            Some((_, member)) if member.slot == slot => MemberLookup::Found(guest::ADDRESS),
            Some((address, _)) => MemberLookup::Found(*address),
            None if is_qualified => MemberLookup::Absent,
            None => MemberLookup::Foreign,
        }
    }
}

#[cfg(test)]
#[path = "private_networks_tests.rs"]
mod tests;
