//! [`State`]: all rows of the tables of a fleet (API keys, names of templates, secrets, webhooks,
//! volumes), in the memory of this member.
//!
//! Rows are stored in parts, which are records. The index is one more record with the last commits,
//! whose rows are not in their parts yet. A *fold* moves them there. Rows reach this state from the
//! index and the parts, or from commits that the writer pushes.

use super::TableError;
use crate::RecordError;
use jiffy_fleet_core::Term;
use jiffy_fleet_core::record::{
    KeyHash, Row, RowKey, SecretRow, TABLE_PARTS, Table, TableIndex, TablePart,
};
use std::collections::HashMap;
use std::sync::Arc;

/// Row with the size of its encoding.
#[derive(Debug, Clone)]
struct Held {
    row: Arc<Row>,
    /// Size of the encoded row in bytes.
    bytes: u32,
}

/// Part of a table.
#[derive(Debug, Default)]
struct Part {
    /// Rows in the order of their keys.
    rows: Vec<Held>,
    /// Size of the encoded rows.
    bytes: usize,
}

/// Owner and name of a secret.
type SecretName = (Option<String>, String);

/// Rows of all tables.
#[derive(Debug)]
pub(super) struct State {
    /// Number of the last commit that the rows include.
    number: u64,
    /// Term of the coordinator that wrote this commit.
    term: Term,
    /// Parts by [`Table::position`].
    tables: [Vec<Part>; Table::ALL.len()],
    /// Keys by the hashes of their current and previous secrets.
    by_hash: HashMap<KeyHash, Arc<Row>>,
    /// Secrets of API keys by owner and name.
    secrets: HashMap<SecretName, Arc<Row>>,
    /// Number of API keys.
    keys: usize,
}

impl Default for State {
    fn default() -> Self {
        let parts = || (0..TABLE_PARTS).map(|_| Part::default()).collect();
        Self {
            number: 0,
            term: Term(0),
            tables: Table::ALL.map(|_| parts()),
            by_hash: HashMap::new(),
            secrets: HashMap::new(),
            keys: 0,
        }
    }
}

/// Compares a row with a key, without copying the row's key.
fn compare(row: &Row, key: &RowKey) -> std::cmp::Ordering {
    match (row.as_key(), key) {
        (Some(row), RowKey::Key(id)) => row.id.as_str().cmp(id),
        _ => row.key().cmp(key),
    }
}

/// Returns the size of an encoded row with the comma after it.
pub(super) fn encoded_bytes(row: &Row) -> usize {
    // Encoding fails only for maps whose keys are no strings, and rows have none.
    serde_json::to_vec(row).map_or(0, |bytes| bytes.len() + 1)
}

impl State {
    pub fn number(&self) -> u64 {
        self.number
    }

    pub fn term(&self) -> Term {
        self.term
    }

    /// Returns the number of API keys.
    pub fn keys(&self) -> usize {
        self.keys
    }

    fn part(&self, table: Table, part: u8) -> &Part {
        &self.tables[table.position()][usize::from(part)]
    }

    pub fn row(&self, key: &RowKey) -> Option<&Arc<Row>> {
        let part = self.part(key.table(), key.part());
        let at = part.rows.binary_search_by(|held| compare(&held.row, key));
        at.ok().map(|at| &part.rows[at].row)
    }

    /// Returns the key with this current or previous secret.
    pub fn key_by_hash(&self, hash: &KeyHash) -> Option<&Arc<Row>> {
        self.by_hash.get(hash)
    }

    /// Returns the secret of an owner with this name.
    pub fn secret(&self, owner: Option<&str>, name: &str) -> Option<&Arc<Row>> {
        self.secrets
            .get(&(owner.map(str::to_owned), name.to_owned()))
    }

    pub fn rows(&self, table: Table) -> impl Iterator<Item = &Arc<Row>> {
        let parts = self.tables[table.position()].iter();
        parts.flat_map(|part| part.rows.iter().map(|held| &held.row))
    }

    /// Returns the rows of a part.
    pub fn rows_of(&self, table: Table, part: u8) -> Vec<Row> {
        let rows = self.part(table, part).rows.iter();
        rows.map(|held| Row::clone(&held.row)).collect()
    }

    /// Returns the size of the encoded rows of a part.
    pub fn bytes_of(&self, table: Table, part: u8) -> usize {
        self.part(table, part).bytes
    }

    /// Returns the parts that must be loaded before `index` can be applied: they contain commits
    /// that the rows in memory do not include.
    pub fn outdated(&self, index: &TableIndex) -> Vec<(Table, u8)> {
        let parts = |table: Table| {
            let folded = index.folded(table).iter().zip(0..=u8::MAX);
            let outdated = folded.filter(|(folded, _)| **folded > self.number);
            outdated.map(move |(_, part)| (table, part))
        };
        Table::ALL.into_iter().flat_map(parts).collect()
    }

    /// Applies an index with the parts that [`Self::outdated`] returned. An index that is older
    /// than the rows changes nothing.
    pub fn apply_index(&mut self, index: &TableIndex, parts: Vec<TablePart>) {
        if index.number < self.number {
            return;
        }
        let mut folded = HashMap::new();
        for part in parts {
            folded.insert((part.table, part.part), part.folded);
            self.replace_part(part);
        }
        for row in &index.pending {
            let key = row.key();
            // The part was read after the index, and may contain newer rows.
            let folded = folded.get(&(key.table(), key.part()));
            if folded.is_none_or(|folded| row.revision > *folded) {
                self.apply(row.clone());
            }
        }
        (self.number, self.term) = (index.number, index.term);
    }

    /// Applies the rows of the commits after `since`, up to `number`. Returns false if earlier
    /// commits are missing, or if no index was applied before.
    pub fn apply_commits(&mut self, since: u64, number: u64, term: Term, rows: Vec<Row>) -> bool {
        if self.number < since || self.number == 0 {
            return false;
        }
        if number > self.number {
            rows.into_iter().for_each(|row| self.apply(row));
            (self.number, self.term) = (number, term);
        }
        true
    }

    fn replace_part(&mut self, part: TablePart) {
        let (table, position) = (part.table.position(), usize::from(part.part));
        let former = std::mem::take(&mut self.tables[table][position]);
        former.rows.iter().for_each(|held| self.forget(&held.row));
        for row in part.rows {
            self.insert(table, position, None, row);
        }
    }

    /// Applies a row, unless the row in memory is newer.
    pub fn apply(&mut self, row: Row) {
        let key = row.key();
        let (table, position) = (key.table().position(), usize::from(key.part()));
        let part = &mut self.tables[table][position];
        let at = part.rows.binary_search_by(|held| compare(&held.row, &key));
        if let Ok(at) = at {
            if part.rows[at].row.revision >= row.revision {
                return;
            }
            let former = part.rows.remove(at);
            part.bytes -= former.bytes as usize;
            self.forget(&former.row);
        }
        if !row.removed {
            let (Ok(at) | Err(at)) = at;
            self.insert(table, position, Some(at), row);
        }
    }

    /// Inserts a row into the part `position` of a table: at index `at`, or at the end.
    fn insert(&mut self, table: usize, position: usize, at: Option<usize>, row: Row) {
        let bytes = u32::try_from(encoded_bytes(&row)).unwrap_or(u32::MAX);
        let row = Arc::new(row);
        if let Some(key) = row.as_key() {
            self.keys += 1;
            if let Some(previous) = key.previous_hash {
                self.by_hash.insert(previous, row.clone());
            }
            self.by_hash.insert(key.hash, row.clone());
        }
        if let Some(secret) = row.as_secret() {
            self.secrets.insert(name_of(secret), row.clone());
        }
        let part = &mut self.tables[table][position];
        part.bytes += bytes as usize;
        let at = at.unwrap_or(part.rows.len());
        part.rows.insert(at, Held { row, bytes });
    }

    /// Removes a row that is no longer current from the number of keys, from the hashes and from
    /// the names of secrets.
    fn forget(&mut self, row: &Row) {
        if let Some(secret) = row.as_secret() {
            let name = name_of(secret);
            let is_own =
                |held: &Arc<Row>| held.as_secret().is_some_and(|held| held.id == secret.id);
            if self.secrets.get(&name).is_some_and(is_own) {
                self.secrets.remove(&name);
            }
        }
        let Some(key) = row.as_key() else { return };
        self.keys -= 1;
        for hash in [Some(key.hash), key.previous_hash].into_iter().flatten() {
            let is_own = |held: &Arc<Row>| held.as_key().is_some_and(|held| held.id == key.id);
            if self.by_hash.get(&hash).is_some_and(is_own) {
                self.by_hash.remove(&hash);
            }
        }
    }
}

/// Returns owner and name of a secret.
fn name_of(secret: &SecretRow) -> SecretName {
    (secret.owner.clone(), secret.name.clone())
}

/// Checks that a part contains all commits up to `folded`, the number that the index states for it.
pub(super) fn check_folded(
    part: Option<TablePart>,
    key: &crate::RecordKey,
    folded: u64,
) -> Result<TablePart, TableError> {
    let found = part.as_ref().map_or(0, |part| part.folded);
    match part {
        Some(part) if found >= folded => Ok(part),
        _ => Err(TableError::Records(RecordError::Regressed {
            record: key.clone(),
            reason: format!("it contains {found} commits, but the index requires {folded}"),
        })),
    }
}
