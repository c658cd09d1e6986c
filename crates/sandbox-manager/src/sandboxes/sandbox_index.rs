//! [`SandboxIndex`]: look-ups of sandboxes by owner, name or token, and lists by age, by means of
//! [`EntryIndexes`](super::entry_indexes::EntryIndexes).

use super::list_order::{ListOrder, ListedSandboxes, SharedPosition};
use super::{Sandboxes, SandboxesInner};
use crate::sandbox::Sandbox;
use smol_str::SmolStr;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Maximum number of entries of an owner's list that are read under one lock.
const LIST_PART: usize = 64;

/// Sandboxes by owner, name or token.
#[derive(Clone, Copy)]
pub struct SandboxIndex<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Returns the operations that look up sandboxes by owner, name or token.
    pub fn index(&self) -> SandboxIndex<'_> {
        SandboxIndex(&self.0)
    }
}

impl SandboxIndex<'_> {
    /// Returns the first `limit` sandboxes that match. Reads only as many records as necessary, or
    /// the records of all running sandboxes, and copies only the result.
    pub fn in_order(
        self,
        listed: ListedSandboxes<'_>,
        order: &ListOrder,
        limit: usize,
        matches: impl Fn(&Sandbox) -> bool,
    ) -> Vec<Sandbox> {
        let indexes = &self.0.indexes;
        let entries = self.0.entries.lock();
        // A sandbox that is being registered or removed may be in an index but has no entry.
        let copy = |id: &SmolStr| {
            let entry = entries.get(id)?;
            entry.with_record(|r| matches(r).then(|| r.clone()))
        };
        let first = |positions: &BTreeSet<SharedPosition>| {
            let sandboxes = order.of(positions).filter_map(|(_, id)| copy(id));
            sandboxes.take(limit).collect()
        };
        match listed {
            // `ages` never changes while a record is locked, so records may be locked under it.
            ListedSandboxes::All => first(&indexes.ages.lock()),
            ListedSandboxes::Running => {
                // The index is copied, so that no record is locked while the index is: a change of
                // a record locks the record first and then the index.
                let running = indexes.running.lock().clone();
                let positions = running.into_iter().filter_map(|id| {
                    let created_ms = entries.get(&id)?.with_record(|r| r.created_ms);
                    Some((created_ms, id))
                });
                first(&positions.collect())
            }
            ListedSandboxes::OfOwner(owner) => {
                let mut order = order.clone();
                let mut sandboxes = Vec::new();
                // The list is read in parts, and the index is unlocked in between. A change of a
                // record locks the record first and then the index, so locking a record under the
                // index could deadlock.
                while sandboxes.len() < limit {
                    let owners = indexes.owners.lock();
                    let part = owners.in_order(owner, &order).take(LIST_PART);
                    let part: Vec<_> = part.map(|(ms, id)| (ms, id.clone())).collect();
                    drop(owners);
                    let Some((ms, id)) = part.last() else {
                        break;
                    };
                    order.after = Some((*ms, id.to_string()));
                    let matching = part.iter().filter_map(|(_, id)| copy(id));
                    sandboxes.extend(matching.take(limit - sandboxes.len()));
                }
                sandboxes
            }
        }
    }

    /// Returns all sandboxes that match, in no particular order. Checks every sandbox, and copies
    /// only the result.
    pub fn all(self, matches: impl Fn(&Sandbox) -> bool) -> Vec<Sandbox> {
        let entries = self.0.entries.lock();
        let sandboxes = entries.values();
        let sandboxes =
            sandboxes.filter_map(|entry| entry.with_record(|r| matches(r).then(|| r.clone())));
        sandboxes.collect()
    }

    /// Returns the ids of the sandboxes of an API key that are not killed.
    pub fn of_owner(self, owner: &str) -> Vec<String> {
        let owners = self.0.indexes.owners.lock();
        owners.of(owner).map(SmolStr::to_string).collect()
    }

    /// Returns the id of the running or paused sandbox whose agent token matches. Checks every
    /// sandbox, and `fits` may compute a signature, so the entries are unlocked meanwhile.
    pub fn by_token(self, fits: impl Fn(&str) -> bool) -> Option<String> {
        let entries: Vec<_> = {
            let entries = self.0.entries.lock();
            let entries = entries.iter();
            entries
                .map(|(id, entry)| (id.clone(), entry.clone()))
                .collect()
        };
        let mut owners = entries.iter().filter(|(_, e)| e.has_token(&fits));
        owners.next().map(|(id, _)| id.to_string())
    }

    /// Returns the sandboxes with this name that are not killed, at most one of each owner.
    pub fn named(self, name: &str) -> Vec<Sandbox> {
        let ids = self.0.indexes.names.ids(name);
        ids.iter().filter_map(|id| self.0.find(id)).collect()
    }
}
