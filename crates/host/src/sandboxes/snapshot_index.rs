//! Snapshots of a host in memory, found by everything that asks for them.

use super::list_order::ListOrder;
use crate::records::{SnapshotPurpose, SnapshotRecord};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Ids by a word, as pairs: most words have one id, and a map of sets would take several times the
/// memory.
#[derive(Debug, Default)]
struct SnapshotGroups(BTreeSet<(String, String)>);

impl SnapshotGroups {
    fn add(&mut self, word: Option<&str>, id: &str) {
        if let Some(word) = word.filter(|word| !word.is_empty()) {
            self.0.insert((word.to_owned(), id.to_owned()));
        }
    }

    fn take(&mut self, word: Option<&str>, id: &str) {
        if let Some(word) = word {
            self.0.remove(&(word.to_owned(), id.to_owned()));
        }
    }

    fn of(&self, word: &str) -> impl Iterator<Item = &String> {
        let word = word.to_owned();
        let from = self.0.range((word.clone(), String::new())..);
        let group = from.take_while(move |(other, _)| *other == word);
        group.map(|(_, id)| id)
    }
}

/// Complete snapshots by id, with their children, names, fingerprints, sandboxes and ages.
#[derive(Debug, Default)]
pub(crate) struct SnapshotIndex {
    records: BTreeMap<String, SnapshotRecord>,
    by_parent: SnapshotGroups,
    by_name: SnapshotGroups,
    by_fingerprint: SnapshotGroups,
    by_sandbox: SnapshotGroups,
    /// By the moment of their creation, in milliseconds since 1970, and id.
    by_age: BTreeSet<(u64, String)>,
}

impl SnapshotIndex {
    /// The snapshot `id`.
    pub fn get(&self, id: &str) -> Option<&SnapshotRecord> {
        self.records.get(id)
    }

    /// Adds a snapshot, or replaces what is known of it.
    pub fn insert(&mut self, record: SnapshotRecord) {
        self.remove(&record.id);
        let id = &record.id;
        self.by_parent.add(record.parent.as_deref(), id);
        self.by_name.add(record.name.as_deref(), id);
        self.by_fingerprint.add(Some(&record.fingerprint), id);
        self.by_sandbox.add(Some(&record.sandbox), id);
        self.by_age.insert((record.created_ms, id.clone()));
        self.records.insert(record.id.clone(), record);
    }

    /// Takes a snapshot out.
    pub fn remove(&mut self, id: &str) -> Option<SnapshotRecord> {
        let record = self.records.remove(id)?;
        self.by_parent.take(record.parent.as_deref(), id);
        self.by_name.take(record.name.as_deref(), id);
        self.by_fingerprint.take(Some(&record.fingerprint), id);
        self.by_sandbox.take(Some(&record.sandbox), id);
        self.by_age.remove(&(record.created_ms, id.to_owned()));
        Some(record)
    }

    /// Returns the count of snapshots.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// All of them, by id.
    pub fn values(&self) -> impl Iterator<Item = &SnapshotRecord> {
        self.records.values()
    }

    /// All ids.
    pub fn ids(&self) -> impl Iterator<Item = &String> {
        self.records.keys()
    }

    /// Those whose parent is `id`.
    pub fn children(&self, id: &str) -> impl Iterator<Item = &String> {
        self.by_parent.of(id)
    }

    /// Those that were taken of `sandbox`.
    pub fn taken_of(&self, sandbox: &str) -> impl Iterator<Item = &SnapshotRecord> {
        let ids = self.by_sandbox.of(sandbox);
        ids.filter_map(|id| self.records.get(id))
    }

    /// All of them by age and id, from a position on.
    pub fn in_order<'a>(
        &'a self,
        order: &'a ListOrder,
    ) -> impl Iterator<Item = &'a SnapshotRecord> {
        let positions = order.of(&self.by_age);
        positions.filter_map(|(_, id)| self.records.get(id))
    }

    /// Those that are called `name`.
    pub fn named(&self, name: &str) -> impl Iterator<Item = &SnapshotRecord> {
        let ids = self.by_name.of(name);
        ids.filter_map(|id| self.records.get(id))
    }

    /// Those whose id begins with `prefix`.
    pub fn beginning_with<'a>(
        &'a self,
        prefix: &'a str,
    ) -> impl Iterator<Item = &'a SnapshotRecord> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let from = self.records.range::<str, _>(from);
        let found = from.take_while(move |(id, _)| id.starts_with(prefix));
        found.map(|(_, record)| record)
    }

    /// Those that are kept for `purpose` and depend on `fingerprint`.
    pub fn kept_for(
        &self,
        purpose: SnapshotPurpose,
        fingerprint: &str,
    ) -> impl Iterator<Item = &SnapshotRecord> {
        let ids = self.by_fingerprint.of(fingerprint);
        let records = ids.filter_map(|id| self.records.get(id));
        records.filter(move |s| s.purpose == purpose && s.kept)
    }
}

impl FromIterator<SnapshotRecord> for SnapshotIndex {
    fn from_iter<T: IntoIterator<Item = SnapshotRecord>>(records: T) -> Self {
        let mut index = Self::default();
        for record in records {
            index.insert(record);
        }
        index
    }
}

/// Sandboxes that are not killed, by the snapshot that they descend from.
#[derive(Debug, Default)]
pub(crate) struct SnapshotUsers(Mutex<SnapshotGroups>);

impl SnapshotUsers {
    fn groups(&self) -> MutexGuard<'_, SnapshotGroups> {
        self.0.lock()
    }

    /// Notes that `sandbox` descends from `now` and no longer from `before`.
    pub fn change(&self, sandbox: &str, before: Option<&str>, now: Option<&str>) {
        if before != now {
            let mut groups = self.groups();
            groups.take(before, sandbox);
            groups.add(now, sandbox);
        }
    }

    /// True if a sandbox descends from `snapshot`.
    pub fn has_any(&self, snapshot: &str) -> bool {
        self.groups().of(snapshot).next().is_some()
    }

    /// At most so many of the sandboxes that descend from `snapshot`.
    pub fn some_of(&self, snapshot: &str, most: usize) -> Vec<String> {
        self.groups().of(snapshot).take(most).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_engine::SandboxSize;

    fn record(id: &str, parent: Option<&str>) -> SnapshotRecord {
        SnapshotRecord {
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
            engine: None,
            parent: parent.map(str::to_owned),
            kept: true,
            stopped_ms: 0.0,
            total_ms: 0.0,
            bytes: 0,
            created_ms: 1,
            store: Default::default(),
        }
    }

    #[test]
    fn a_snapshot_is_indexed_by_its_current_record_only() {
        let mut index: SnapshotIndex = [record("a", None), record("ab", Some("a"))]
            .into_iter()
            .collect();
        let found = |index: &SnapshotIndex| {
            [
                index.children("a").count(),
                index.named("n").count(),
                index.kept_for(SnapshotPurpose::Template, "f").count(),
                index.beginning_with("a").count(),
            ]
        };
        assert_eq!(found(&index), [1, 2, 2, 2]);
        index.insert(SnapshotRecord {
            name: None,
            kept: false,
            parent: None,
            ..record("ab", None)
        });
        assert_eq!(found(&index), [0, 1, 1, 2]);
        assert_eq!(index.beginning_with("ab").count(), 1);
        index.remove("a");
        index.remove("a");
        assert_eq!(found(&index), [0, 0, 0, 1]);
        index.remove("ab");
        assert_eq!(index.len(), 0);
        assert!(index.by_parent.0.is_empty() && index.by_fingerprint.0.is_empty());
        index.insert(SnapshotRecord {
            sandbox: "x".to_owned(),
            ..record("c", None)
        });
        assert_eq!(index.taken_of("x").count(), 1);
        index.remove("c");
        assert!(index.by_sandbox.0.is_empty() && index.by_age.is_empty());
    }

    #[test]
    fn a_snapshot_has_users_as_long_as_one_descends_from_it() {
        let users = SnapshotUsers::default();
        users.change("x", None, Some("s"));
        users.change("y", None, Some("s"));
        users.change("x", Some("s"), None);
        assert_eq!(users.some_of("s", 9), ["y"]);
        users.change("y", Some("s"), Some("t"));
        assert_eq!((users.has_any("s"), users.has_any("t")), (false, true));
    }
}
