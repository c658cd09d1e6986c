//! Database of the builder, the SQLite file `<home>/builds.db`: templates, builds and build logs.

mod builds;
mod image_requests;
mod log_lines;
mod migrations;
mod pending_ends;
mod schema;
mod step_uses;
mod templates;

pub use builds::{BuildRecord, BuildStatus, FailureReason, WantedSize};
pub use log_lines::{LogLevel, LogLine, LogPosition, LogQuery, MAX_LOG_LINES};
pub(super) use pending_ends::BuildEnd;
pub use templates::TemplateRecord;

use parking_lot::{Mutex, MutexGuard};
use pending_ends::PendingEnds;
use rusqlite::Connection;
use schema::SCHEMA_VERSION;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Error of the database.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Error of SQLite.
    #[error("cannot use the database of builds {}: {source}; check that the disk is writable and not full, and restore a damaged file from a backup", path.display())]
    Database {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: rusqlite::Error,
    },
    /// Schema of a newer program.
    #[error("{} has schema version {found}, but this program requires version {SCHEMA_VERSION}: use the \
        version of jiffy that wrote the file, or move the file elsewhere", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Version in the file.
        found: i64,
    },
}

/// Database of templates, builds and logs.
pub struct BuildRecords {
    path: PathBuf,
    connection: Mutex<Connection>,
    pending_ends: PendingEnds,
}

impl BuildRecords {
    /// Opens or creates `<home>/builds.db`.
    pub fn open(home: &Path) -> Result<Self, RecordError> {
        let path = home.join("builds.db");
        let failed = |source| RecordError::Database {
            path: path.clone(),
            source,
        };
        // Ignore an error: opening the database reports it.
        let _ = jiffy_sandbox_manager::restrict_to_owner(&path);
        let connection = Connection::open(&path).map_err(failed)?;
        let prepared = connection
            // A power failure may lose the last transactions, but does not damage the file.
            .pragma_update(None, "journal_mode", "WAL")
            .and_then(|()| connection.pragma_update(None, "synchronous", "NORMAL"))
            // Migrations replace tables to which others refer.
            .and_then(|()| connection.pragma_update(None, "foreign_keys", false));
        prepared.map_err(failed)?;
        let found: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(failed)?;
        // A newer program may have changed the meaning of the data.
        if !(0..=SCHEMA_VERSION).contains(&found) {
            return Err(RecordError::Version { path, found });
        }
        // A version of 0 denotes a new file.
        schema::migrate(&connection, found).map_err(failed)?;
        connection
            .pragma_update(None, "foreign_keys", true)
            .map_err(failed)?;
        connection
            // These tables are not part of the schema version: see `step_uses` and
            // `image_requests`.
            .execute_batch(step_uses::STEPS_TABLE)
            .and_then(|()| connection.execute_batch(image_requests::IMAGE_REQUESTS_TABLE))
            .map_err(failed)?;
        Ok(Self {
            path,
            connection: Mutex::new(connection),
            pending_ends: PendingEnds::default(),
        })
    }

    /// Calls `work` with the connection, which serialises all accesses.
    pub(super) fn with_connection<T>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, RecordError> {
        let connection: MutexGuard<'_, Connection> = self.connection.lock();
        work(&connection).map_err(|source| RecordError::Database {
            path: self.path.clone(),
            source,
        })
    }
}

/// Encodes a value as JSON. The types of this module are always serialisable.
pub(super) fn json<T: Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

// SQLite has no unsigned integers. Times and counts never exceed the range of `i64`.
pub(super) fn to_sql(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

pub(super) fn from_sql(n: i64) -> u64 {
    u64::try_from(n).unwrap_or_default()
}

#[cfg(test)]
mod tests;
