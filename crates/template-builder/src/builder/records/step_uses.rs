//! Time of the last use of each build step, by which unused steps are pruned.
//!
//! The key of a step is a hash of everything that determines its result (`step_key.rs`).

use super::{BuildRecords, RecordError, from_sql, to_sql};
use rusqlite::params;
use std::collections::HashMap;

/// The table is not part of the versioned schema: earlier versions of this program ignore it.
pub(super) const STEPS_TABLE: &str = "
    CREATE TABLE IF NOT EXISTS steps (
        key TEXT PRIMARY KEY,
        used_ms INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
";

impl BuildRecords {
    /// Records a use of a step.
    pub fn touch_step(&self, key: &str, at_ms: u64) -> Result<(), RecordError> {
        self.with_connection(|c| {
            let write = "INSERT INTO steps (key, used_ms) VALUES (?1, ?2)
                ON CONFLICT (key) DO UPDATE SET used_ms = ?2";
            c.execute(write, params![key, to_sql(at_ms)]).map(drop)
        })
    }

    /// Returns the time of the last use of each step, in milliseconds since 1970.
    pub(in crate::builder) fn last_uses(&self) -> Result<HashMap<String, u64>, RecordError> {
        self.with_connection(|c| {
            let mut query = c.prepare_cached("SELECT key, used_ms FROM steps")?;
            let row = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, from_sql(row.get(1)?)));
            query.query_map([], row)?.collect()
        })
    }

    /// Deletes the last use of a step.
    pub(in crate::builder) fn delete_step_use(&self, key: &str) -> Result<(), RecordError> {
        self.with_connection(|c| {
            c.execute("DELETE FROM steps WHERE key = ?1", [key])
                .map(drop)
        })
    }
}
