//! [`TablePart`]: one of the records that contain the rows of a table (API keys, or template
//! names). A hash of a row's key selects its part, so that one change rewrites only a small record.
//! A *commit* is one write of changes, and commits are numbered. New changes are first stored in
//! the index ([`super::TableIndex`]).

use super::super::{Checked, Format, RecordError, UnknownFields, decode, encode, rule};
use super::{MAX_TABLE_BYTES, Row, Table};
use crate::ids::FleetId;
use serde::{Deserialize, Serialize};

/// Maximum size of the encoded rows of a part to which rows may be added. A revocation adds a time
/// to the row of a key. The space that remains in the record suffices for the revocation of all
/// keys of the part.
pub const MAX_PART_ROWS_BYTES: usize = MAX_TABLE_BYTES - (256 << 10);

/// Record `fleet/tables/<table>/<part>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TablePart {
    version: Format,
    /// Fleet.
    pub fleet: FleetId,
    /// Table.
    pub table: Table,
    /// Number of the part.
    pub part: u8,
    /// Number of the last commit whose changes the part contains.
    pub folded: u64,
    /// Rows in the order of their keys.
    pub rows: Vec<Row>,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl TablePart {
    /// Returns a part with these rows.
    #[must_use]
    pub fn new(fleet: FleetId, table: Table, part: u8, folded: u64, rows: Vec<Row>) -> Self {
        Self {
            version: Format::default(),
            fleet,
            table,
            part,
            folded,
            rows,
            unknown: UnknownFields::new(),
        }
    }

    /// Returns the JSON of the record.
    ///
    /// # Errors
    /// [`RecordError::TooLarge`], or [`RecordError::Damaged`] if a rule is violated.
    pub fn encode(&self) -> Result<Vec<u8>, RecordError> {
        encode(self)
    }

    /// Returns the part with this JSON.
    ///
    /// # Errors
    /// [`RecordError`] if the record cannot be used, or belongs to another fleet, table or part.
    pub fn decode(
        bytes: &[u8],
        fleet: &FleetId,
        table: Table,
        part: u8,
    ) -> Result<Self, RecordError> {
        let record: Self = decode(bytes)?;
        if (&record.fleet, record.table, record.part) != (fleet, table, part) {
            return Err(RecordError::ForeignKey {
                record: Self::NAME,
                expected: format!("part {part} of {table} of fleet {fleet}"),
                actual: format!(
                    "part {} of {} of fleet {}",
                    record.part, record.table, record.fleet
                ),
            });
        }
        Ok(record)
    }
}

impl Checked for TablePart {
    const NAME: &'static str = "table part";
    const MAX_BYTES: usize = MAX_TABLE_BYTES;

    fn check(&self) -> Result<(), String> {
        let mut previous = None;
        for row in &self.rows {
            row.check()?;
            let key = row.key();
            rule(
                key.table() == self.table && key.part() == self.part,
                "a row belongs to another part",
            )?;
            rule(
                !row.removed && (1..=self.folded).contains(&row.revision),
                "a row was removed, or has an invalid `revision`",
            )?;
            rule(
                previous.as_ref() < Some(&key),
                "the rows are not in the order of their keys, or a row is repeated",
            )?;
            previous = Some(key);
        }
        Ok(())
    }
}
