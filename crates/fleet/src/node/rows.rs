//! Rows of the local sandboxes. The coordinator of the fleet has a directory with one row per
//! sandbox (its host and state), and one per name. A keyed hash of the id or name identifies a row.
//! This module has the rows of this host and the changes that were not sent to the coordinator yet.

use jiffy_fleet_core::{Row, RowChange, SandboxHash};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::ops::Bound;

/// Returns the hash of a sandbox id, or of another text by which sandboxes are found. `kind`
/// separates ids from other texts.
#[must_use]
pub fn row_hash(secret: &[u8; 32], kind: &str, parts: &[&str]) -> SandboxHash {
    // The secret has a fixed length, and each part is preceded by its length.
    let mut hash = Sha256::new();
    hash.update(secret);
    for part in std::iter::once(&kind).chain(parts) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let digest = hash.finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    SandboxHash(bytes)
}

/// Rows of the local sandboxes, and changes that the executor has not processed yet.
#[derive(Debug, Default)]
pub(super) struct Rows {
    state: Mutex<State>,
}

/// Rows of this member, and their changes.
#[derive(Debug, Default)]
struct State {
    rows: BTreeMap<SandboxHash, Row>,
    /// Unprocessed changes of each row.
    changes: BTreeMap<SandboxHash, Changes>,
}

/// Unprocessed changes of a row: its latest state, its removal, or both if it was added and then
/// removed.
///
/// A row that was removed before the executor has processed its addition is reported as both. The
/// coordinator reserves a name for a create, and ends the reservation only when a row that it knows
/// is removed. It must therefore receive the addition.
#[derive(Debug, Default)]
struct Changes {
    /// Latest state of the row, if it was added or changed.
    put: Option<Row>,
    is_removed: bool,
}

impl Rows {
    /// Records a change. Returns false if the row is unchanged.
    pub fn change(&self, change: RowChange) -> bool {
        let mut state = self.state.lock();
        match change {
            RowChange::Put(row) => {
                if state.rows.insert(row.hash, row) == Some(row) {
                    return false;
                }
                let changes = Changes {
                    put: Some(row),
                    is_removed: false,
                };
                state.changes.insert(row.hash, changes);
            }
            RowChange::Removed(hash) => {
                if state.rows.remove(&hash).is_none() {
                    return false;
                }
                state.changes.entry(hash).or_default().is_removed = true;
            }
        }
        true
    }

    /// Returns the row of a sandbox.
    pub fn find(&self, hash: SandboxHash) -> Option<Row> {
        self.state.lock().rows.get(&hash).copied()
    }

    /// Removes and returns the unprocessed changes.
    pub fn take_changes(&self) -> impl Iterator<Item = RowChange> + use<> {
        let changes = std::mem::take(&mut self.state.lock().changes);
        changes.into_iter().flat_map(|(hash, changes)| {
            let put = changes.put.map(RowChange::Put);
            let removed = changes.is_removed.then_some(RowChange::Removed(hash));
            put.into_iter().chain(removed)
        })
    }

    /// Returns at most `limit` rows after `after`, and whether no row follows.
    pub fn page(&self, after: Option<SandboxHash>, limit: usize) -> (Vec<Row>, bool) {
        let state = self.state.lock();
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut following = state.rows.range((start, Bound::Unbounded));
        let rows: Vec<_> = following
            .by_ref()
            .take(limit)
            .map(|(_, &row)| row)
            .collect();
        (rows, following.next().is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_fleet_core::{Revision, RowState};

    fn row(number: u8, state: RowState) -> Row {
        Row {
            hash: SandboxHash([number; 16]),
            revision: Revision(0),
            state,
        }
    }

    #[test]
    fn hashes_differ_by_secret_kind_and_the_borders_of_parts() {
        let hashes = [
            row_hash(&[1; 32], "id", &["ab", "c"]),
            row_hash(&[1; 32], "id", &["a", "bc"]),
            row_hash(&[1; 32], "id", &["abc"]),
            row_hash(&[1; 32], "name", &["abc"]),
            row_hash(&[2; 32], "id", &["abc"]),
        ];
        let distinct: std::collections::BTreeSet<_> = hashes.iter().collect();
        assert_eq!(distinct.len(), hashes.len());
    }

    #[test]
    fn unprocessed_changes_of_a_row_are_merged_and_pages_contain_each_row_once() {
        let rows = Rows::default();
        for number in 1..=5 {
            assert!(rows.change(RowChange::Put(row(number, RowState::Running))));
        }
        assert!(!rows.change(RowChange::Put(row(5, RowState::Running))));
        assert!(rows.change(RowChange::Put(row(5, RowState::Paused))));
        assert!(rows.change(RowChange::Removed(SandboxHash([4; 16]))));
        assert!(!rows.change(RowChange::Removed(SandboxHash([9; 16]))));
        let changes: Vec<_> = rows.take_changes().collect();
        assert_eq!(changes.len(), 6);
        // A row that is added and removed at once is reported as both.
        assert_eq!(changes[3], RowChange::Put(row(4, RowState::Running)));
        assert_eq!(changes[4], RowChange::Removed(SandboxHash([4; 16])));
        assert_eq!(changes[5], RowChange::Put(row(5, RowState::Paused)));
        assert!(rows.change(RowChange::Removed(SandboxHash([3; 16]))));
        assert!(rows.change(RowChange::Put(row(3, RowState::Paused))));
        let changes: Vec<_> = rows.take_changes().collect();
        assert_eq!(changes, [RowChange::Put(row(3, RowState::Paused))]);
        assert_eq!(rows.take_changes().count(), 0);
        let (first, is_last) = rows.page(None, 2);
        assert!(!is_last);
        let (second, is_last) = rows.page(first.last().map(|row| row.hash), 2);
        assert!(is_last);
        let numbers = first.iter().chain(&second).map(|row| row.hash.0[0]);
        assert_eq!(numbers.collect::<Vec<_>>(), [1, 2, 3, 5]);
    }
}
