//! Finding sandboxes and snapshots by id, and holding on to snapshots.

pub(super) mod capture;
pub(super) mod fetch_snapshot;
pub(super) mod lineage_length;
mod restore;
pub(super) mod snapshot_fold;
pub(super) mod snapshot_removal;
pub(super) mod snapshot_upkeep;
pub(super) mod take_snapshot;
pub(super) mod upload;

use super::entry::SandboxEntry;
use super::list_order::{ListOrder, ListedSnapshots};
use super::snapshot_catalog::SnapshotPin;
use super::{OperationError, Sandboxes, SandboxesInner};
use crate::sandbox::Sandbox;
use crate::snapshot::Snapshot;
use smol_str::SmolStr;
use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;

/// Snapshots of sandboxes: listing, removal, verification.
#[derive(Clone, Copy)]
pub struct Snapshots<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Snapshots of sandboxes: listing, removal, verification.
    pub fn snapshots(&self) -> Snapshots<'_> {
        Snapshots(&self.0)
    }
}

/// Most ids that a refusal of an ambiguous one names.
const MAX_CANDIDATES: usize = 100;

/// The one key that is `id` or begins with it.
fn choose<'a>(
    mut beginning_with_it: impl Iterator<Item = &'a str>,
    id: &str,
    what: &'static str,
    list: &'static str,
) -> Result<String, OperationError> {
    let unknown = || OperationError::Unknown {
        what,
        id: id.to_owned(),
        list,
    };
    // The shortest is the first.
    let first = beginning_with_it.next().ok_or_else(unknown)?;
    match beginning_with_it.next() {
        _ if first == id => Ok(first.to_owned()),
        _ if id.is_empty() => Err(unknown()),
        None => Ok(first.to_owned()),
        Some(second) => {
            let others = beginning_with_it.take(MAX_CANDIDATES - 2);
            Err(OperationError::Ambiguous {
                id: id.to_owned(),
                candidates: [first, second]
                    .into_iter()
                    .chain(others)
                    .map(str::to_owned)
                    .collect(),
            })
        }
    }
}

/// Keys that begin with `prefix`, in order.
fn beginning_with<'a, T>(
    map: &'a BTreeMap<SmolStr, T>,
    prefix: &'a str,
) -> impl Iterator<Item = &'a str> {
    let from = (Bound::Included(prefix), Bound::Unbounded);
    let keys = map.range::<str, _>(from).map(|(key, _)| &**key);
    keys.take_while(move |key| key.starts_with(prefix))
}

impl SandboxesInner {
    /// One sandbox by its id or the beginning of it.
    pub(super) fn entry(&self, id: &str) -> Result<Arc<SandboxEntry>, OperationError> {
        let entries = self.entries.lock();
        if let Some(entry) = entries.get(id) {
            return Ok(entry.clone());
        }
        let candidates = beginning_with(&entries, id);
        let id = choose(candidates, id, "sandbox", "jiffy ls --all")?;
        entries
            .get(id.as_str())
            .cloned()
            .ok_or(OperationError::Unknown {
                what: "sandbox",
                id,
                list: "jiffy ls --all",
            })
    }

    /// Record of one sandbox by its whole id.
    pub(super) fn find(&self, id: &str) -> Option<Sandbox> {
        self.entries.lock().get(id).map(|entry| entry.record())
    }
}

impl Snapshots<'_> {
    /// All snapshots, oldest first; with `sandbox`, those that were taken of it or that it descends
    /// from, at a cost of their number.
    pub fn list(self, sandbox: Option<&str>) -> Result<Vec<Snapshot>, OperationError> {
        let Some(id) = sandbox else {
            return Ok(self.in_order(
                ListedSnapshots::All,
                &ListOrder::default(),
                usize::MAX,
                |_| true,
            ));
        };
        let record = self.0.entry(id)?.record();
        let lineage = self.lineage(record.snapshot.as_deref());
        let snapshots = self.0.catalog.read();
        let of_it = snapshots.taken_of(&record.id);
        let others = lineage.iter().filter_map(|id| snapshots.get(id));
        let others = others.filter(|s| s.sandbox != record.id);
        let mut all: Vec<_> = of_it.chain(others).cloned().collect();
        drop(snapshots);
        all.sort_by(|one, other| (one.created_ms, &one.id).cmp(&(other.created_ms, &other.id)));
        Ok(all)
    }

    /// Those that were taken of a sandbox by its whole id, which may be gone.
    pub fn taken_of(self, sandbox: &str) -> Vec<Snapshot> {
        let snapshots = self.0.catalog.read();
        snapshots.taken_of(sandbox).cloned().collect()
    }

    /// Snapshots whose name is `id`, or whose id is that or begins with it, oldest first.
    pub fn like(self, id: &str) -> Vec<Snapshot> {
        let snapshots = self.0.catalog.read();
        let by_id = snapshots.beginning_with(id);
        let by_name = snapshots.named(id).filter(|s| !s.id.starts_with(id));
        let mut found: Vec<_> = by_id.chain(by_name).cloned().collect();
        drop(snapshots);
        found.sort_by_key(|s| s.created_ms);
        found
    }

    /// Returns the count of snapshots.
    pub fn count(self) -> usize {
        self.0.catalog.read().len()
    }

    /// Ids of the snapshots that are `wanted`.
    pub(super) fn ids_of(self, wanted: impl Fn(&Snapshot) -> bool) -> Vec<String> {
        let snapshots = self.0.catalog.read();
        let wanted = snapshots.values().filter(|s| wanted(s));
        wanted.map(|s| s.id.clone()).collect()
    }

    /// A snapshot by its id, the beginning of it, or its name, held on to.
    pub(super) fn pin(self, id: &str) -> Result<(Snapshot, SnapshotPin), OperationError> {
        const LIST: &str = "jiffy snapshots";
        let snapshots = self.0.catalog.read();
        // An id first: a name that somebody made like another one's id does not stand in for it.
        let named: Vec<_> = match snapshots.get(id) {
            Some(exact) => vec![exact],
            None => snapshots.named(id).collect(),
        };
        let record = match named.as_slice() {
            [one] => (*one).clone(),
            [] => {
                let candidates = snapshots.beginning_with(id).map(|s| &*s.id);
                let id = choose(candidates, id, "snapshot", LIST)?;
                let unknown = OperationError::Unknown {
                    what: "snapshot",
                    id: id.clone(),
                    list: LIST,
                };
                snapshots.get(&id).cloned().ok_or(unknown)?
            }
            several => {
                return Err(OperationError::Ambiguous {
                    id: id.to_owned(),
                    candidates: several.iter().map(|s| s.id.clone()).collect(),
                });
            }
        };
        // Under the lock of the snapshots, so that it cannot be collected in between.
        let pin = self.0.catalog.pin(&record.id);
        Ok((record, pin))
    }

    /// The same once it is stored.
    pub(super) async fn pin_stored(
        self,
        id: &str,
    ) -> Result<(Snapshot, SnapshotPin), OperationError> {
        let (record, pin) = self.pin(id)?;
        match record.storing {
            true => Ok((self.stored(&record.id).await?, pin)),
            false => Ok((record, pin)),
        }
    }

    /// `id` and everything below it.
    pub(super) fn lineage(self, id: Option<&str>) -> HashSet<String> {
        let snapshots = self.0.catalog.read();
        let mut lineage = HashSet::new();
        let mut next = id.map(str::to_owned);
        while let Some(id) = next {
            next = snapshots.get(&id).and_then(|s| s.parent.clone());
            if !lineage.insert(id) {
                break;
            }
        }
        lineage
    }

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

    /// Waits until the files of all removed snapshots are removed, at most two seconds for files
    /// that are in use.
    pub async fn removed_files(self) {
        self.0.gc.removed_files().await;
    }

    /// Notes how large a snapshot has become.
    pub(super) fn measure(self, id: &str) {
        let known = self.0.catalog.read().get(id).map(|s| s.bytes);
        let size = self
            .0
            .snapshot_engines
            .files_of(id)
            .ok()
            .and_then(|files| files.size(id));
        let (Some(bytes), Some(known)) = (size, known) else {
            return;
        };
        if bytes != known {
            self.0.catalog.update(id, |snapshot| snapshot.bytes = bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_prefix_finds_exactly_one_sandbox() {
        let keys = ["ab", "abc", "abd", "x", "xy1", "xy2"].map(|id| (SmolStr::new(id), ()));
        let keys = BTreeMap::from(keys);
        let find = |id| choose(beginning_with(&keys, id), id, "sandbox", "ls");
        assert_eq!(find("abc").unwrap(), "abc");
        assert_eq!(find("x").unwrap(), "x");
        assert_eq!(find("ab").unwrap(), "ab");
        assert_eq!(find("abd").unwrap(), "abd");
        let ambiguous = find("xy").unwrap_err().to_string();
        assert!(ambiguous.contains("xy1") && ambiguous.contains("xy2"));
        assert!(matches!(find("q"), Err(OperationError::Unknown { .. })));
        assert!(find("").is_err());
    }
}
