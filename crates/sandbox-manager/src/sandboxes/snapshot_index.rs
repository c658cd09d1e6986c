//! [`SnapshotIndex`]: the records of all snapshots of a host in memory, with indexes. The catalog
//! (`snapshot_catalog.rs`) locks it.
//!
//! A *captured* snapshot is acknowledged to its client, but its files are not complete yet. The
//! *fingerprint* of the snapshot of a template or build step is a hash of everything that
//! determines its guests.

use super::id_groups::{IdGroups, sort_by_text};
use super::list_order::{ListOrder, ListedSnapshots, SharedPosition};
use super::owner_ages::OwnerAges;
use crate::snapshot::Snapshot;
use jiffy_api_types::SnapshotPurpose;
use smol_str::SmolStr;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Snapshots by id, with their children, names, sandboxes, owners and ages. Includes captured
/// snapshots whose files are still being stored.
#[derive(Debug, Default)]
pub(crate) struct SnapshotIndex {
    records: BTreeMap<SmolStr, Box<Snapshot>>,
    by_parent: IdGroups,
    /// Snapshots below a removed snapshot, by the newest removed one.
    by_pruned: IdGroups,
    by_name: IdGroups,
    /// Snapshots of templates and of build steps, by the hash of everything that determines their
    /// content. Other snapshots are not looked up by fingerprint.
    by_fingerprint: IdGroups,
    by_sandbox: IdGroups,
    /// Snapshots that have an owner.
    by_owner: IdGroups,
    by_age: BTreeSet<SharedPosition>,
    /// Snapshots requested by clients, which most lists show. Snapshots of templates and of paused
    /// sandboxes are far more numerous.
    requested_by_age: BTreeSet<SharedPosition>,
    requested_by_owner: OwnerAges,
    /// Sum of the disk space of all snapshots.
    bytes: u64,
}

/// Returns the fingerprint by which a snapshot is looked up. `None` for the other purposes.
fn lookup_fingerprint(record: &Snapshot) -> Option<&str> {
    let purposes = [SnapshotPurpose::Template, SnapshotPurpose::Step];
    let sought = purposes.contains(&record.purpose);
    sought.then_some(&*record.fingerprint)
}

fn newest_pruned(record: &Snapshot) -> Option<&str> {
    record.pruned.as_ref().map(|pruned| &*pruned.newest)
}

impl SnapshotIndex {
    /// Returns the snapshot `id`.
    pub fn get(&self, id: &str) -> Option<&Snapshot> {
        self.records.get(id).map(|record| &**record)
    }

    /// Adds a snapshot, or replaces its record.
    pub fn insert(&mut self, record: Snapshot) {
        // The former record may have other keys in the indexes.
        self.remove(&record.id);
        let id = SmolStr::new(&*record.id);
        self.by_parent.add(record.parent.as_deref(), &id);
        self.by_pruned.add(newest_pruned(&record), &id);
        self.by_name.add(record.name.as_deref(), &id);
        self.by_fingerprint.add(lookup_fingerprint(&record), &id);
        self.by_sandbox.add(Some(&record.sandbox), &id);
        self.by_owner.add(record.owner.as_deref(), &id);
        self.by_age.insert((record.created_ms, id.clone()));
        if record.is_requested() {
            self.requested_by_age
                .insert((record.created_ms, id.clone()));
            let owner = record.owner.as_deref();
            self.requested_by_owner.add(owner, record.created_ms, &id);
        }
        self.bytes = self.bytes.saturating_add(record.bytes);
        self.records.insert(id, Box::new(record));
    }

    /// Removes a snapshot.
    pub fn remove(&mut self, id: &str) -> Option<Snapshot> {
        // The stored id is reused, since the indexes share its allocation.
        let (id, record) = self.records.remove_entry(id)?;
        self.by_parent.take(record.parent.as_deref(), &id);
        self.by_pruned.take(newest_pruned(&record), &id);
        self.by_name.take(record.name.as_deref(), &id);
        self.by_fingerprint.take(lookup_fingerprint(&record), &id);
        self.by_sandbox.take(Some(&record.sandbox), &id);
        self.by_owner.take(record.owner.as_deref(), &id);
        self.bytes = self.bytes.saturating_sub(record.bytes);
        let owner = record.owner.as_deref();
        // No effect if the snapshot is not in these indexes.
        self.requested_by_owner.take(owner, record.created_ms, &id);
        let position = (record.created_ms, id);
        self.requested_by_age.remove(&position);
        self.by_age.remove(&position);
        Some(*record)
    }

    /// Returns the number of snapshots.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Returns the sum of the recorded disk space of all snapshots.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns all snapshots in the order of their ids.
    pub fn values(&self) -> impl Iterator<Item = &Snapshot> {
        self.records.values().map(|record| &**record)
    }

    /// Returns the first `limit` ids that are greater than `after`.
    pub fn following(&self, after: &str, limit: usize) -> Vec<String> {
        let from = (Bound::Excluded(after), Bound::Unbounded);
        let following = self.records.range::<str, _>(from).take(limit);
        following.map(|(id, _)| id.to_string()).collect()
    }

    /// Returns the snapshots whose parent is `id`.
    pub fn children(&self, id: &str) -> impl Iterator<Item = &str> {
        self.by_parent.of(id)
    }

    /// Returns the snapshots whose newest pruned ancestor is `id`.
    pub fn below_pruned(&self, id: &str) -> impl Iterator<Item = &Snapshot> {
        let ids = self.by_pruned.of(id);
        ids.filter_map(|id| self.get(id))
    }

    /// Returns the snapshots that were taken of `sandbox`.
    pub fn taken_of(&self, sandbox: &str) -> impl Iterator<Item = &Snapshot> {
        let ids = self.by_sandbox.of(sandbox);
        ids.filter_map(|id| self.get(id))
    }

    /// Returns the snapshots of `owner`.
    pub fn owned_by(&self, owner: &str) -> impl Iterator<Item = &Snapshot> {
        let ids = self.by_owner.of(owner);
        ids.filter_map(|id| self.get(id))
    }

    /// Returns the snapshots of a list by age and id, from a position on.
    pub fn in_order<'a>(
        &'a self,
        listed: ListedSnapshots<'_>,
        order: &'a ListOrder,
    ) -> impl Iterator<Item = &'a Snapshot> {
        let of = |positions| order.of(positions).map(|(ms, id)| (*ms, id));
        let positions: Box<dyn Iterator<Item = (u64, &SmolStr)>> = match listed {
            ListedSnapshots::All => Box::new(of(&self.by_age)),
            ListedSnapshots::Requested => Box::new(of(&self.requested_by_age)),
            ListedSnapshots::RequestedBy(owner) => self.requested_by_owner.in_order(owner, order),
        };
        positions.filter_map(|(_, id)| self.get(id))
    }

    /// Returns the snapshots with this name.
    pub fn named(&self, name: &str) -> impl Iterator<Item = &Snapshot> {
        let ids = self.by_name.of(name);
        ids.filter_map(|id| self.get(id))
    }

    /// Returns the snapshots whose id begins with `prefix`.
    pub fn beginning_with<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a Snapshot> {
        // In the order of texts, the ids with the prefix follow each other.
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let from = self.records.range::<str, _>(from);
        let records = from.take_while(move |(id, _)| id.starts_with(prefix));
        records.map(|(_, record)| &**record)
    }

    /// Returns the retained snapshots of a template or a build step with this fingerprint.
    pub fn retained_for(
        &self,
        purpose: SnapshotPurpose,
        fingerprint: &str,
    ) -> impl Iterator<Item = &Snapshot> {
        let ids = self.by_fingerprint.of(fingerprint);
        let records = ids.filter_map(|id| self.get(id));
        records.filter(move |s| s.purpose == purpose && s.retained)
    }

    /// Returns the retained snapshots of all templates or of all build steps. The cost depends on
    /// the total number of both.
    pub fn all_retained_for(&self, purpose: SnapshotPurpose) -> impl Iterator<Item = &Snapshot> {
        let records = self.by_fingerprint.ids().filter_map(|id| self.get(id));
        records.filter(move |s| s.purpose == purpose && s.retained)
    }
}

impl FromIterator<Box<Snapshot>> for SnapshotIndex {
    /// Builds the index from snapshots with different ids. Reads the records sequentially for cache
    /// locality, and sorts once, which is faster than separate insertions.
    fn from_iter<T: IntoIterator<Item = Box<Snapshot>>>(records: T) -> Self {
        let records = records.into_iter();
        let mut records: Vec<_> = records.map(|r| (SmolStr::new(&*r.id), r)).collect();
        let group = |word: fn(&Snapshot) -> Option<&str>| {
            let pairs = records.iter().map(|(id, record)| (word(record), id));
            pairs.collect::<IdGroups>()
        };
        let ages = records.iter().map(|(id, r)| (r.created_ms, id.clone()));
        let requested = records.iter().filter(|(_, r)| r.is_requested());
        let requested_ages = requested.clone().map(|(id, r)| (r.created_ms, id.clone()));
        let requested_by_owner = requested.map(|(id, r)| (r.owner.as_deref(), r.created_ms, id));
        let bytes = records.iter().map(|(_, record)| record.bytes);
        let mut this = Self {
            by_parent: group(|s| s.parent.as_deref()),
            by_pruned: group(newest_pruned),
            by_name: group(|s| s.name.as_deref()),
            by_fingerprint: group(lookup_fingerprint),
            by_sandbox: group(|s| Some(&s.sandbox)),
            by_owner: group(|s| s.owner.as_deref()),
            by_age: ages.collect(),
            requested_by_age: requested_ages.collect(),
            requested_by_owner: requested_by_owner.collect(),
            // Saturates like `insert`, so that both ways to build an index agree.
            bytes: bytes.fold(0, u64::saturating_add),
            records: BTreeMap::new(),
        };
        // Sorted input makes the construction of the map linear.
        sort_by_text(&mut records, |(id, _)| id);
        this.records = records.into_iter().collect();
        this
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_engine_api::SandboxSize;

    fn record(id: &str, parent: Option<&str>) -> Snapshot {
        Snapshot {
            id: id.to_owned(),
            name: Some("n".to_owned()),
            purpose: SnapshotPurpose::Template,
            sandbox: String::new(),
            owner: None,
            env: BTreeMap::new(),
            site: Default::default(),
            template: "base".to_owned(),
            fingerprint: "f".to_owned(),
            size: SandboxSize::default(),
            engine: "microvm".to_owned(),
            parent: parent.map(str::to_owned),
            retained: true,
            stopped_ms: 0.0,
            total_ms: 0.0,
            bytes: 0,
            created_ms: 1,
            pruned: None,
            content: Default::default(),
            storing: false,
            store: Default::default(),
        }
    }

    #[test]
    fn a_snapshot_is_indexed_by_its_current_record_only() {
        let mut index: SnapshotIndex = [record("a", None), record("ab", Some("a"))]
            .map(Box::new)
            .into_iter()
            .collect();
        let counts = |index: &SnapshotIndex| {
            [
                index.children("a").count(),
                index.named("n").count(),
                index.retained_for(SnapshotPurpose::Template, "f").count(),
                index.beginning_with("a").count(),
            ]
        };
        assert_eq!(counts(&index), [1, 2, 2, 2]);
        index.insert(Snapshot {
            name: None,
            retained: false,
            parent: None,
            ..record("ab", None)
        });
        assert_eq!(counts(&index), [0, 1, 1, 2]);
        assert_eq!(index.beginning_with("ab").count(), 1);
        index.remove("a");
        index.remove("a");
        assert_eq!(counts(&index), [0, 0, 0, 1]);
        index.remove("ab");
        assert_eq!(index.len(), 0);
        assert!(index.by_parent.is_empty() && index.by_fingerprint.is_empty());
        index.insert(Snapshot {
            sandbox: "x".to_owned(),
            ..record("c", None)
        });
        assert_eq!(index.taken_of("x").count(), 1);
        index.remove("c");
        assert!(index.by_sandbox.is_empty() && index.by_age.is_empty());
    }

    #[test]
    fn building_and_growing_an_index_are_equivalent() {
        let with = |id: &str, purpose, owner: &str, bytes| Snapshot {
            purpose,
            owner: Some(owner.to_owned()),
            bytes,
            ..record(id, None)
        };
        use SnapshotPurpose::{Requested, Step, Template};
        let all = [
            with("b", Requested, "k", 1),
            with("c", Template, "k", 2),
            with("a", Step, "l", 4),
        ];
        let at_once: SnapshotIndex = all.iter().cloned().map(Box::new).collect();
        let mut grown = SnapshotIndex::default();
        for record in &all {
            grown.insert(record.clone());
        }
        assert_eq!(format!("{at_once:?}"), format!("{grown:?}"));
        assert_eq!((grown.bytes(), grown.owned_by("k").count()), (7, 2));
        let template = grown.all_retained_for(Template).map(|s| &*s.id);
        assert_eq!(template.collect::<Vec<_>>(), ["c"]);
        assert_eq!(grown.following("", 2), ["a", "b"]);
        assert_eq!(grown.following("b", 2), ["c"]);
        grown.insert(with("b", Requested, "l", 10));
        assert_eq!((grown.bytes(), grown.owned_by("k").count()), (16, 1));
        grown.remove("b");
        assert_eq!((grown.bytes(), grown.owned_by("l").count()), (6, 1));
    }
}
