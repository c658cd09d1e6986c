//! Names of the completed migrations of the data directory.

use super::{BuildRecords, RecordError};

impl BuildRecords {
    /// Returns whether the migration is complete.
    pub(in crate::builder) fn is_migrated(&self, name: &str) -> Result<bool, RecordError> {
        let query = "SELECT count(*) FROM migrations WHERE name = ?1";
        self.with_connection(|c| Ok(c.query_row(query, [name], |row| row.get::<_, i64>(0))? > 0))
    }

    /// Records that the migration is complete.
    pub(in crate::builder) fn set_migrated(&self, name: &str) -> Result<(), RecordError> {
        let write = "INSERT OR IGNORE INTO migrations (name) VALUES (?1)";
        self.with_connection(|c| c.execute(write, [name]).map(drop))
    }
}
