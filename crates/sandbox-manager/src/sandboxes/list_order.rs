//! Lists by age, a part at a time.

use super::{SandboxIndex, Snapshots};
use crate::sandbox::Sandbox;
use crate::snapshot::Snapshot;
use smol_str::SmolStr;
use std::collections::BTreeSet;
use std::ops::Bound;

/// Items of an owner's list that are looked at together.
const LIST_PART: usize = 64;

/// Position of an item in a list: the moment of its creation, in milliseconds since 1970, and its
/// id.
pub type ListPosition = (u64, String);

/// The same, with an id that other indexes have, too.
pub(crate) type SharedPosition = (u64, SmolStr);

/// Order of a list, and where to begin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListOrder {
    /// True if the youngest comes first.
    pub descending: bool,
    /// Position behind which the list begins; none: at its beginning.
    pub after: Option<ListPosition>,
}

impl ListOrder {
    /// The positions in this order. Costs as much as is taken of them.
    pub(crate) fn of<'a>(
        &self,
        positions: &'a BTreeSet<SharedPosition>,
    ) -> Box<dyn Iterator<Item = &'a SharedPosition> + 'a> {
        let after = match &self.after {
            Some((ms, id)) => Bound::Excluded((*ms, SmolStr::new(id))),
            None => Bound::Unbounded,
        };
        match self.descending {
            true => Box::new(positions.range((Bound::Unbounded, after)).rev()),
            false => Box::new(positions.range((after, Bound::Unbounded))),
        }
    }
}

/// Sandboxes that a list is made of. What comes from an index of few costs little on a host that
/// has many.
#[derive(Debug, Clone, Copy)]
pub enum ListedSandboxes<'a> {
    /// All, also those that were killed.
    All,
    /// Those that run.
    Running,
    /// Those of an owner that were not killed.
    OfOwner(&'a str),
}

/// Snapshots that a list is made of.
#[derive(Debug, Clone, Copy)]
pub enum ListedSnapshots<'a> {
    /// All, also those of templates and of sandboxes that sleep.
    All,
    /// Those that were asked for.
    Asked,
    /// Those that an owner asked for.
    AskedBy(&'a str),
}

impl SandboxIndex<'_> {
    /// The first `limit` sandboxes that are `wanted`. Looks at no more than that takes, or at all
    /// that run, and copies only what it returns.
    pub fn in_order(
        self,
        listed: ListedSandboxes<'_>,
        order: &ListOrder,
        limit: usize,
        wanted: impl Fn(&Sandbox) -> bool,
    ) -> Vec<Sandbox> {
        let indexes = &self.0.indexes;
        let entries = self.0.entries.lock();
        // One that is being made or removed has no entry.
        let look = |id: &SmolStr| {
            let entry = entries.get(id)?;
            entry.look(|r| wanted(r).then(|| r.clone()))
        };
        let first = |positions: &BTreeSet<SharedPosition>| {
            let found = order.of(positions).filter_map(|(_, id)| look(id));
            found.take(limit).collect()
        };
        match listed {
            ListedSandboxes::All => first(&indexes.ages.lock()),
            ListedSandboxes::Running => {
                let running = indexes.running.lock().clone();
                let positions = running.into_iter().filter_map(|id| {
                    let created_ms = entries.get(&id)?.look(|r| r.created_ms);
                    Some((created_ms, id))
                });
                first(&positions.collect())
            }
            ListedSandboxes::OfOwner(owner) => {
                let mut order = order.clone();
                let mut found = Vec::new();
                // In parts: a record changes under its own lock, and the index under that.
                while found.len() < limit {
                    let owners = indexes.owners.lock();
                    let part = owners.in_order(owner, &order).take(LIST_PART);
                    let part: Vec<_> = part.map(|(ms, id)| (ms, id.clone())).collect();
                    drop(owners);
                    let Some((ms, id)) = part.last() else {
                        break;
                    };
                    order.after = Some((*ms, id.to_string()));
                    let wanted = part.iter().filter_map(|(_, id)| look(id));
                    found.extend(wanted.take(limit - found.len()));
                }
                found
            }
        }
    }
}

impl SandboxIndex<'_> {
    /// All sandboxes that are `wanted`, in no order. Looks at every one, and copies only what it
    /// returns.
    pub fn all(self, wanted: impl Fn(&Sandbox) -> bool) -> Vec<Sandbox> {
        let entries = self.0.entries.lock();
        let found = entries.values();
        let found = found.filter_map(|entry| entry.look(|r| wanted(r).then(|| r.clone())));
        found.collect()
    }
}

impl Snapshots<'_> {
    /// The first `limit` snapshots that are `wanted`. Looks at no more than that takes, and copies
    /// only what it returns.
    pub fn in_order(
        self,
        listed: ListedSnapshots<'_>,
        order: &ListOrder,
        limit: usize,
        wanted: impl Fn(&Snapshot) -> bool,
    ) -> Vec<Snapshot> {
        let snapshots = self.0.catalog.read();
        let found = snapshots.in_order(listed, order).filter(|s| wanted(s));
        found.take(limit).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(order: &ListOrder) -> String {
        let all = [(1, "b"), (1, "a"), (2, "c"), (3, "d")];
        let all = all.map(|(ms, id)| (ms, SmolStr::new(id)));
        let all = BTreeSet::from(all);
        order.of(&all).map(|(_, id)| &**id).collect()
    }

    #[test]
    fn a_list_begins_behind_its_position_in_either_order() {
        let from = |descending, after: Option<(u64, &str)>| {
            let after = after.map(|(ms, id)| (ms, id.to_owned()));
            listed(&ListOrder { descending, after })
        };
        assert_eq!(from(false, None), "abcd");
        assert_eq!(from(true, None), "dcba");
        assert_eq!(from(false, Some((1, "a"))), "bcd");
        assert_eq!(from(true, Some((2, "c"))), "ba");
        // An item that is not there any more.
        assert_eq!(from(false, Some((2, "x"))), "d");
        assert_eq!(from(true, Some((0, ""))), "");
    }
}
