//! [`Snapshots`]: lists, finds and pins the snapshots of this host. The submodules take, restore,
//! upload, fetch and remove them, and fold them: merge the files of a removed snapshot into the
//! files of its child.
//!
//! A *pin* protects a snapshot from garbage collection.

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
use jiffy_api_types::SnapshotContent;
use smol_str::SmolStr;
use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;

/// Operations on snapshots.
#[derive(Clone, Copy)]
pub struct Snapshots<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Returns the operations on snapshots.
    pub fn snapshots(&self) -> Snapshots<'_> {
        Snapshots(&self.0)
    }
}

/// Maximum number of ids in the error for an ambiguous prefix.
const MAX_CANDIDATES: usize = 100;

/// Returns the key that is `id`, or the only key that begins with it. `candidates` are the keys
/// that begin with `id`, in order.
fn choose<'a>(
    mut candidates: impl Iterator<Item = &'a str>,
    id: &str,
    what: &'static str,
    list: &'static str,
) -> Result<String, OperationError> {
    let unknown = || OperationError::Unknown {
        what,
        id: id.to_owned(),
        list,
    };
    // If `id` itself is a key, it comes first.
    let first = candidates.next().ok_or_else(unknown)?;
    match candidates.next() {
        _ if first == id => Ok(first.to_owned()),
        // Every key begins with the empty text.
        _ if id.is_empty() => Err(unknown()),
        None => Ok(first.to_owned()),
        Some(second) => {
            let others = candidates.take(MAX_CANDIDATES - 2);
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

/// Returns the keys that begin with `prefix`, in order.
fn beginning_with<'a, T>(
    map: &'a BTreeMap<SmolStr, T>,
    prefix: &'a str,
) -> impl Iterator<Item = &'a str> {
    // In the order of texts, the keys with the prefix follow each other.
    let from = (Bound::Included(prefix), Bound::Unbounded);
    let keys = map.range::<str, _>(from).map(|(key, _)| &**key);
    keys.take_while(move |key| key.starts_with(prefix))
}

impl SandboxesInner {
    /// Returns a sandbox by its id or a prefix of it.
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

    /// Returns the record of a sandbox by its complete id.
    pub(super) fn find(&self, id: &str) -> Option<Sandbox> {
        self.entries.lock().get(id).map(|entry| entry.record())
    }
}

impl Snapshots<'_> {
    /// Returns the content of snapshot `id`. `None` if this host has no record of it.
    pub fn content_of(self, id: &str) -> Option<SnapshotContent> {
        self.0.catalog.get(id).map(|snapshot| snapshot.content)
    }

    /// Returns all snapshots, oldest first. With `sandbox`, returns the snapshots that were taken
    /// of the sandbox and the snapshots that it descends from; the cost depends on their number
    /// only.
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
        let own = snapshots.taken_of(&record.id);
        let others = lineage.iter().filter_map(|id| snapshots.get(id));
        // The sandbox's own snapshots are in `own` already.
        let others = others.filter(|s| s.sandbox != record.id);
        let mut all: Vec<_> = own.chain(others).cloned().collect();
        drop(snapshots);
        all.sort_by(|one, other| (one.created_ms, &one.id).cmp(&(other.created_ms, &other.id)));
        Ok(all)
    }

    /// Returns the snapshots that were taken of a sandbox with this complete id, even if the
    /// sandbox was removed.
    pub fn taken_of(self, sandbox: &str) -> Vec<Snapshot> {
        let snapshots = self.0.catalog.read();
        snapshots.taken_of(sandbox).cloned().collect()
    }

    /// Returns the snapshots whose name is `id`, or whose id begins with `id`, oldest first.
    pub fn like(self, id: &str) -> Vec<Snapshot> {
        let snapshots = self.0.catalog.read();
        let by_id = snapshots.beginning_with(id);
        let by_name = snapshots.named(id).filter(|s| !s.id.starts_with(id));
        let mut list: Vec<_> = by_id.chain(by_name).cloned().collect();
        drop(snapshots);
        list.sort_by_key(|s| s.created_ms);
        list
    }

    /// Returns the number of snapshots.
    pub fn count(self) -> usize {
        self.0.catalog.read().len()
    }

    /// Returns the ids of the matching snapshots.
    pub(super) fn ids_of(self, matches: impl Fn(&Snapshot) -> bool) -> Vec<String> {
        let snapshots = self.0.catalog.read();
        let matching = snapshots.values().filter(|s| matches(s));
        matching.map(|s| s.id.clone()).collect()
    }

    /// Pins a snapshot by its id, a prefix of the id, or its name.
    pub(super) fn pin(self, id: &str) -> Result<(Snapshot, SnapshotPin), OperationError> {
        const LIST: &str = "jiffy snapshots";
        let snapshots = self.0.catalog.read();
        // A complete id has precedence: a snapshot named like the id of another must not hide it.
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
        // The snapshot is pinned while the index is still locked, so that garbage collection cannot
        // remove the snapshot between the lookup and the pin.
        let pin = self.0.catalog.pin(&record.id);
        Ok((record, pin))
    }

    /// Like [`Self::pin`]. Waits until the snapshot is stored.
    pub(super) async fn pin_stored(
        self,
        id: &str,
    ) -> Result<(Snapshot, SnapshotPin), OperationError> {
        let (record, pin) = self.pin(id)?;
        if record.storing {
            return Ok((self.stored(&record.id).await?, pin));
        }
        Ok((record, pin))
    }

    /// Returns `id` and its ancestors.
    pub(super) fn lineage(self, id: Option<&str>) -> HashSet<String> {
        let snapshots = self.0.catalog.read();
        let mut lineage = HashSet::new();
        let mut next = id.map(str::to_owned);
        while let Some(id) = next {
            next = snapshots.get(&id).and_then(|s| s.parent.clone());
            // Damaged records could form a cycle.
            if !lineage.insert(id) {
                break;
            }
        }
        lineage
    }

    /// Returns the first `limit` matching snapshots. Reads only as many records as necessary, and
    /// copies only the result.
    pub fn in_order(
        self,
        listed: ListedSnapshots<'_>,
        order: &ListOrder,
        limit: usize,
        matches: impl Fn(&Snapshot) -> bool,
    ) -> Vec<Snapshot> {
        let snapshots = self.0.catalog.read();
        let matching = snapshots.in_order(listed, order).filter(|s| matches(s));
        matching.take(limit).cloned().collect()
    }

    /// Waits until the files of all removed snapshots are removed, at most two seconds for files
    /// that are in use.
    pub async fn removed_files(self) {
        self.0.gc.removed_files().await;
    }

    /// Records the current size of a snapshot if it differs from the recorded one. Reads the disk.
    pub(super) fn measure(self, id: &str) {
        let recorded = self.0.catalog.read().get(id).map(|s| s.bytes);
        let size = self
            .0
            .snapshot_engines
            .files_of(id)
            .ok()
            .and_then(|files| files.size(id));
        let (Some(bytes), Some(recorded)) = (size, recorded) else {
            return;
        };
        // The journal is written only if the size has changed.
        if bytes != recorded {
            self.0.catalog.update(id, |snapshot| snapshot.bytes = bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_prefix_must_be_unambiguous() {
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
