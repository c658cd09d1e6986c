//! [`IdGroups`]: sets of ids with a common key, in little memory. For example, the key is the
//! parent of snapshots, or the snapshot from which sandboxes descend.

use parking_lot::{Mutex, MutexGuard};
use smol_str::SmolStr;
use std::collections::BTreeSet;

/// Ids grouped by a key, stored as pairs of key and id. A map of sets would need several times the
/// memory, since most keys have one id.
#[derive(Debug, Default)]
pub(crate) struct IdGroups(BTreeSet<(SmolStr, SmolStr)>);

/// Returns the key of a group. A missing key and the empty key have no group.
fn group_key(key: Option<&str>) -> Option<SmolStr> {
    key.filter(|key| !key.is_empty()).map(SmolStr::new)
}

impl IdGroups {
    pub fn add(&mut self, key: Option<&str>, id: &SmolStr) {
        if let Some(key) = group_key(key) {
            self.0.insert((key, id.clone()));
        }
    }

    pub fn take(&mut self, key: Option<&str>, id: &SmolStr) {
        if let Some(key) = group_key(key) {
            self.0.remove(&(key, id.clone()));
        }
    }

    /// Returns the ids of a group, in order.
    pub fn of(&self, key: &str) -> impl Iterator<Item = &str> {
        let key = SmolStr::new(key);
        // The empty id is the smallest, so the range starts at the first id of the key.
        let from = self.0.range((key.clone(), SmolStr::default())..);
        let group = from.take_while(move |(other, _)| *other == key);
        group.map(|(_, id)| &**id)
    }

    /// Returns the ids of all groups.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(_, id)| &**id)
    }

    /// Returns whether there is no id.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'a> FromIterator<(Option<&'a str>, &'a SmolStr)> for IdGroups {
    fn from_iter<T: IntoIterator<Item = (Option<&'a str>, &'a SmolStr)>>(pairs: T) -> Self {
        let pairs = pairs.into_iter();
        let pairs = pairs.filter_map(|(key, id)| Some((group_key(key)?, id.clone())));
        let mut pairs: Vec<_> = pairs.collect();
        sort_by_text(&mut pairs, |(key, _)| key);
        Self(pairs.into_iter().collect())
    }
}

/// Sorts by text, before the items are inserted into a map: inserting sorted items is faster.
/// Compares the first bytes as a number, which decides most comparisons.
pub(super) fn sort_by_text<T>(items: &mut [T], text: impl Fn(&T) -> &str) {
    items.sort_by(|one, other| {
        let (one, other) = (text(one), text(other));
        // Equal numbers occur for long common prefixes, and for texts that end with zero bytes.
        let first_bytes = leading_number(one).cmp(&leading_number(other));
        first_bytes.then_with(|| one.cmp(other))
    });
}

/// Returns the first 16 bytes of a text as a number with the same order as the text. Missing bytes
/// count as 0.
fn leading_number(text: &str) -> u128 {
    // Big-endian numbers have the same order as the bytes.
    if let Some(first) = text.as_bytes().first_chunk() {
        return u128::from_be_bytes(*first);
    }
    let mut bytes = [0; 16];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    u128::from_be_bytes(bytes)
}

/// Sandboxes that are not killed, by the snapshot that they descend from or were created from.
#[derive(Debug, Default)]
pub(crate) struct SnapshotUsers(Mutex<IdGroups>);

impl SnapshotUsers {
    pub fn new(groups: IdGroups) -> Self {
        Self(Mutex::new(groups))
    }

    fn groups(&self) -> MutexGuard<'_, IdGroups> {
        self.0.lock()
    }

    /// Changes the snapshot from which `sandbox` descends from `before` to `now`.
    pub fn change(&self, sandbox: &SmolStr, before: Option<&str>, now: Option<&str>) {
        // A change of a record rarely concerns its snapshot, so the lock is rarely needed.
        if before != now {
            let mut groups = self.groups();
            groups.take(before, sandbox);
            groups.add(now, sandbox);
        }
    }

    /// Returns whether any sandbox descends from `snapshot`.
    pub fn has_any(&self, snapshot: &str) -> bool {
        self.groups().of(snapshot).next().is_some()
    }

    /// Returns at most `limit` of the sandboxes that descend from `snapshot`.
    pub fn some_of(&self, snapshot: &str, limit: usize) -> Vec<String> {
        let groups = self.groups();
        groups.of(snapshot).take(limit).map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorting_by_text_uses_the_order_of_strings() {
        let long = "0123456789abcdef";
        let mut texts = vec![
            format!("{long}b"),
            "b".to_owned(),
            long.to_owned(),
            "a\0".to_owned(),
            "\u{e4}".to_owned(),
            format!("{long}a"),
            String::new(),
            "a".to_owned(),
        ];
        let mut expected = texts.clone();
        expected.sort();
        sort_by_text(&mut texts, |text| text);
        assert_eq!(texts, expected);
    }

    #[test]
    fn building_and_growing_groups_are_equivalent() {
        let ids = ["a", "b", "c"].map(SmolStr::new);
        let keys = [Some("x"), None, Some("x")];
        let at_once: IdGroups = keys.into_iter().zip(&ids).collect();
        let mut grown = IdGroups::default();
        for (key, id) in keys.into_iter().zip(&ids) {
            grown.add(key, id);
        }
        assert_eq!(at_once.0, grown.0);
        assert_eq!(grown.of("x").collect::<Vec<_>>(), ["a", "c"]);
    }

    #[test]
    fn a_snapshot_has_users_while_a_sandbox_descends_from_it() {
        let users = SnapshotUsers::default();
        let [x, y] = ["x", "y"].map(SmolStr::new);
        users.change(&x, None, Some("s"));
        users.change(&y, None, Some("s"));
        users.change(&x, Some("s"), None);
        assert_eq!(users.some_of("s", 9), ["y"]);
        users.change(&y, Some("s"), Some("t"));
        assert_eq!((users.has_any("s"), users.has_any("t")), (false, true));
    }
}
