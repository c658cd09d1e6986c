//! Opens SQLite databases of the data directory: [`open`]. Secrets, volumes and webhooks are in
//! such databases. The journal of sandboxes has code of its own (`jiffy-sandbox-manager`).

use rusqlite::Connection;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum wait for a lock of a database, also for a process that is exiting.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Settings with which an acknowledged change survives a power failure, and a removed value does
/// not remain in the file.
pub const DURABLE: &[(&str, &str)] = &[
    ("journal_mode", "WAL"),
    ("synchronous", "FULL"),
    ("foreign_keys", "ON"),
    ("secure_delete", "ON"),
];

/// Tables of a database.
#[derive(Debug, Clone, Copy)]
pub struct Schema {
    /// Version, which is stored in the database.
    pub version: i64,
    /// Statements that create the tables.
    pub tables: &'static str,
}

/// A database cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file cannot be created or opened.
    #[error("cannot use {}: {source}", path.display())]
    File {
        /// Path of the database.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// SQLite failed.
    #[error("{} cannot be used: {source}; check that the disk is writable and not full, and restore a damaged file from a backup", path.display())]
    Database {
        /// Path of the database.
        path: PathBuf,
        /// Cause.
        source: rusqlite::Error,
    },
    /// The file was written by another version.
    #[error("{} has version {found}: use the version of jiffy that wrote it, or move it away", path.display())]
    Version {
        /// Path of the database.
        path: PathBuf,
        /// Version in the file.
        found: i64,
    },
}

/// Opens a database with `settings` (pragmas). Creates it with mode 0600 if it does not exist.
///
/// # Errors
/// [`OpenError`], also for a database of another version.
pub fn open(
    path: &Path,
    schema: &Schema,
    settings: &[(&str, &str)],
) -> Result<Connection, OpenError> {
    let path = path.to_owned();
    // SQLite would create the file with the mode of the umask.
    let mut options = OpenOptions::new();
    let options = options.create(true).truncate(false).write(true).mode(0o600);
    options.open(&path).map_err(|source| OpenError::File {
        path: path.clone(),
        source,
    })?;
    let failed = |source| OpenError::Database {
        path: path.clone(),
        source,
    };
    let connection = Connection::open(&path).map_err(failed)?;
    connection.busy_timeout(BUSY_TIMEOUT).map_err(failed)?;
    for (name, value) in settings {
        let set = connection.pragma_update(None, name, value);
        set.map_err(failed)?;
    }
    let found: i64 = connection
        .query_row("PRAGMA user_version", [], |row| row.get(0))
        .map_err(failed)?;
    let Schema { version, tables } = schema;
    match found {
        0 => connection
            .execute_batch(&format!(
                "BEGIN; {tables} PRAGMA user_version = {version}; COMMIT;"
            ))
            .map_err(failed)?,
        found if found == *version => {}
        _ => return Err(OpenError::Version { path, found }),
    }
    Ok(connection)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const SCHEMA: Schema = Schema {
        version: 3,
        tables: "CREATE TABLE things (name TEXT NOT NULL) STRICT;",
    };

    #[test]
    fn a_database_is_private_and_persists() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a.db");
        let connection = open(&path, &SCHEMA, DURABLE).unwrap();
        let insert = "INSERT INTO things VALUES ('a')";
        connection.execute(insert, []).unwrap();
        drop(connection);
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        let connection = open(&path, &SCHEMA, DURABLE).unwrap();
        let count = connection.query_row("SELECT count(*) FROM things", [], |row| row.get(0));
        assert_eq!(count, Ok(1));
        let mode = connection.query_row("PRAGMA journal_mode", [], |row| row.get(0));
        assert_eq!(mode, Ok("wal".to_owned()));
    }

    #[test]
    fn databases_of_other_versions_and_other_files_are_rejected() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a.db");
        drop(open(&path, &SCHEMA, DURABLE).unwrap());
        let newer = Schema {
            version: 4,
            ..SCHEMA
        };
        let error = open(&path, &newer, DURABLE).unwrap_err();
        assert!(matches!(error, OpenError::Version { found: 3, .. }));
        std::fs::write(&path, "not a database, but a text of some length").unwrap();
        let error = open(&path, &SCHEMA, DURABLE).unwrap_err();
        assert!(matches!(error, OpenError::Database { .. }), "{error}");
        let error = open(home.path(), &SCHEMA, DURABLE).unwrap_err();
        assert!(matches!(error, OpenError::File { .. }), "{error}");
    }
}
