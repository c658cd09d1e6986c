//! Finding sandboxes and snapshots by id, and holding on to snapshots.

use super::entry::{SandboxEntry, lock};
use super::{OperationError, Sandboxes, SandboxesInner};
use crate::records::SnapshotRecord;
use jiffy_engine::Engine;
use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;

/// Most ids that a refusal of an ambiguous one names.
const MAX_CANDIDATES: usize = 100;

/// As long as it lives, the snapshot is not collected.
pub(crate) struct SnapshotPin<E: Engine> {
    inner: Arc<SandboxesInner<E>>,
    id: String,
}

impl<E: Engine> Drop for SnapshotPin<E> {
    fn drop(&mut self) {
        let mut pins = lock(&self.inner.pins);
        if let Some(count) = pins.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                pins.remove(&self.id);
            }
        }
    }
}

/// The one key that is `id` or begins with it.
fn choose<'a>(
    mut beginning_with_it: impl Iterator<Item = &'a String>,
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
        _ if first == id => Ok(first.clone()),
        _ if id.is_empty() => Err(unknown()),
        None => Ok(first.clone()),
        Some(second) => {
            let others = beginning_with_it.take(MAX_CANDIDATES - 2);
            Err(OperationError::Ambiguous {
                id: id.to_owned(),
                candidates: [first, second].into_iter().chain(others).cloned().collect(),
            })
        }
    }
}

/// Keys that begin with `prefix`, in order.
fn beginning_with<'a, T>(
    map: &'a BTreeMap<String, T>,
    prefix: &'a str,
) -> impl Iterator<Item = &'a String> {
    let from = (Bound::Included(prefix), Bound::Unbounded);
    let keys = map.range::<str, _>(from).map(|(key, _)| key);
    keys.take_while(move |key| key.starts_with(prefix))
}

impl<E: Engine> Sandboxes<E> {
    pub(super) fn entry(&self, id: &str) -> Result<Arc<SandboxEntry<E::Guest>>, OperationError> {
        let entries = lock(&self.0.entries);
        if let Some(entry) = entries.get(id) {
            return Ok(entry.clone());
        }
        let candidates = beginning_with(&entries, id);
        let id = choose(candidates, id, "sandbox", "jiffy ls --all")?;
        entries.get(&id).cloned().ok_or(OperationError::Unknown {
            what: "sandbox",
            id,
            list: "jiffy ls --all",
        })
    }

    /// A snapshot by its id, the beginning of it, or its name, held on to.
    pub(super) fn pin(&self, id: &str) -> Result<(SnapshotRecord, SnapshotPin<E>), OperationError> {
        const LIST: &str = "jiffy snapshots";
        let snapshots = lock(&self.0.snapshots);
        // An id first: a name that somebody made like another one's id does not stand in for it.
        let named: Vec<_> = match snapshots.get(id) {
            Some(exact) => vec![exact],
            None => snapshots.named(id).collect(),
        };
        let record = match named.as_slice() {
            [one] => (*one).clone(),
            [] => {
                let candidates = snapshots.beginning_with(id).map(|s| &s.id);
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
        let pin = self.hold(&record.id);
        Ok((record, pin))
    }

    /// Holds on to a snapshot, also to one that is only being taken: between its completion and the
    /// record of the sandbox that it is of, nothing else says that it is needed.
    pub(super) fn hold(&self, id: &str) -> SnapshotPin<E> {
        *lock(&self.0.pins).entry(id.to_owned()).or_insert(0) += 1;
        SnapshotPin {
            inner: self.0.clone(),
            id: id.to_owned(),
        }
    }

    /// `id` and everything below it.
    pub(super) fn lineage(&self, id: Option<&str>) -> HashSet<String> {
        let snapshots = lock(&self.0.snapshots);
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_prefix_finds_exactly_one_sandbox() {
        let keys = ["ab", "abc", "abd", "x", "xy1", "xy2"].map(|id| (id.to_owned(), ()));
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
