//! [`TableIndex`]: the record by which changes of the tables (API keys, template names, secrets,
//! webhooks, keys of identity tokens, volumes) are committed.
//!
//! A commit adds changed rows to `pending`, in one conditional replace. Later the writer *folds*
//! pending rows: it rewrites the parts of the tables to which they belong, and removes them here. A
//! reader loads the parts whose numbers have changed, and applies the pending rows.

use super::super::{Checked, Format, RecordError, UnknownFields, decode, encode, rule};
use super::{MAX_TABLE_BYTES, Row, RowKey, TABLE_PARTS, Table};
use crate::ids::{FleetId, MemberId, Term};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Size of the encoded pending rows above which the writer rewrites parts before the next commit.
pub const MAX_PENDING_BYTES: usize = 768 << 10;

/// Record `fleet/tables/index`. Each commit replaces it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableIndex {
    version: Format,
    /// Fleet.
    pub fleet: FleetId,
    /// Number of commits so far. It identifies the state of the tables.
    pub number: u64,
    /// Term in which the writer was the coordinator.
    pub term: Term,
    /// Member that wrote the last commit.
    pub writer: MemberId,
    /// Number of the last commit that each part of [`Table::Keys`] contains.
    pub keys: Vec<u64>,
    /// Number of the last commit that each part of [`Table::Templates`] contains.
    pub templates: Vec<u64>,
    /// Number of the last commit that each part of [`Table::Secrets`] contains.
    #[serde(default = "unwritten")]
    pub secrets: Vec<u64>,
    /// Number of the last commit that each part of [`Table::Webhooks`] contains.
    #[serde(default = "unwritten")]
    pub webhooks: Vec<u64>,
    /// Number of the last commit that each part of [`Table::Identity`] contains.
    #[serde(default = "unwritten")]
    pub identity: Vec<u64>,
    /// Number of the last commit that each part of [`Table::Volumes`] contains.
    #[serde(default = "unwritten")]
    pub volumes: Vec<u64>,
    /// Changed rows that their parts do not contain yet, at most one per key.
    pub pending: Vec<Row>,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// Returns the numbers of a table without parts.
fn unwritten() -> Vec<u64> {
    vec![0; TABLE_PARTS]
}

impl TableIndex {
    /// Returns the index of empty tables.
    #[must_use]
    pub fn new(fleet: FleetId, term: Term, writer: MemberId) -> Self {
        Self {
            version: Format::default(),
            fleet,
            number: 1,
            term,
            writer,
            keys: unwritten(),
            templates: unwritten(),
            secrets: unwritten(),
            webhooks: unwritten(),
            identity: unwritten(),
            volumes: unwritten(),
            pending: Vec::new(),
            unknown: UnknownFields::new(),
        }
    }

    /// Returns the numbers of the last commits that the parts of a table contain.
    #[must_use]
    pub fn folded(&self, table: Table) -> &[u64] {
        match table {
            Table::Keys => &self.keys,
            Table::Templates => &self.templates,
            Table::Secrets => &self.secrets,
            Table::Webhooks => &self.webhooks,
            Table::Identity => &self.identity,
            Table::Volumes => &self.volumes,
        }
    }

    /// Records that a part contains all commits up to the current one, and removes its pending
    /// rows.
    pub fn fold(&mut self, table: Table, part: u8) {
        let number = self.number;
        let numbers = match table {
            Table::Keys => &mut self.keys,
            Table::Templates => &mut self.templates,
            Table::Secrets => &mut self.secrets,
            Table::Webhooks => &mut self.webhooks,
            Table::Identity => &mut self.identity,
            Table::Volumes => &mut self.volumes,
        };
        if let Some(folded) = numbers.get_mut(usize::from(part)) {
            *folded = number;
        }
        self.pending.retain(|row| {
            let key = row.key();
            key.table() != table || key.part() != part
        });
    }

    /// Adds the rows of the next commit. They replace pending rows with the same keys.
    pub fn commit(&mut self, rows: &[Row]) {
        let changed: BTreeSet<RowKey> = rows.iter().map(Row::key).collect();
        self.pending.retain(|row| !changed.contains(&row.key()));
        self.pending.extend_from_slice(rows);
        self.number += 1;
    }

    /// Returns the JSON of the record.
    ///
    /// # Errors
    /// [`RecordError::TooLarge`], or [`RecordError::Damaged`] if a rule is violated.
    pub fn encode(&self) -> Result<Vec<u8>, RecordError> {
        encode(self)
    }

    /// Returns the index with this JSON.
    ///
    /// # Errors
    /// [`RecordError`] if the record cannot be used, or belongs to another fleet.
    pub fn decode(bytes: &[u8], fleet: &FleetId) -> Result<Self, RecordError> {
        let index: Self = decode(bytes)?;
        if index.fleet != *fleet {
            return Err(RecordError::ForeignKey {
                record: Self::NAME,
                expected: format!("fleet {fleet}"),
                actual: format!("fleet {}", index.fleet),
            });
        }
        Ok(index)
    }
}

impl Checked for TableIndex {
    const NAME: &'static str = "index of tables";
    const MAX_BYTES: usize = MAX_TABLE_BYTES;

    fn check(&self) -> Result<(), String> {
        rule(
            (1..u64::MAX).contains(&self.number),
            "`number` is out of range",
        )?;
        for table in Table::ALL {
            let numbers = self.folded(table);
            rule(
                numbers.len() == TABLE_PARTS && numbers.iter().all(|n| *n <= self.number),
                "the numbers of the parts are invalid",
            )?;
        }
        let mut keys = BTreeSet::new();
        for row in &self.pending {
            row.check()?;
            let key = row.key();
            let folded = self.folded(key.table())[usize::from(key.part())];
            rule(
                row.revision > folded && row.revision <= self.number,
                "a pending row has an invalid `revision`",
            )?;
            rule(keys.insert(key), "a pending row is repeated")?;
        }
        Ok(())
    }
}
