//! Database of webhooks and deliveries: `<home>/webhooks.db`.

use crate::WebhookError;
use parking_lot::{Mutex, MutexGuard};
use rusqlite::Connection;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Version of the schema.
const SCHEMA_VERSION: i64 = 1;
/// Schema. The owner is the id of an API key; empty for the owner of the host. `since_us` is the
/// time of the newest event when a webhook was created or enabled. `state` is 0 for a pending
/// delivery, 1 for a failed one. `position` has one row: the time of the last queued event.
const SCHEMA: &str = "
    CREATE TABLE webhooks (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        url TEXT NOT NULL,
        enabled INTEGER NOT NULL,
        events TEXT NOT NULL,
        secret BLOB NOT NULL,
        created_ms INTEGER NOT NULL,
        since_us INTEGER NOT NULL,
        dropped INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE INDEX webhooks_of_owner ON webhooks (owner, created_ms, id);
    CREATE TABLE deliveries (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        webhook TEXT NOT NULL REFERENCES webhooks (id) ON DELETE CASCADE,
        sandbox TEXT NOT NULL,
        event TEXT NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL,
        created_ms INTEGER NOT NULL,
        attempts INTEGER NOT NULL DEFAULT 0,
        next_ms INTEGER NOT NULL,
        state INTEGER NOT NULL DEFAULT 0,
        error TEXT
    ) STRICT;
    CREATE INDEX deliveries_in_order ON deliveries (webhook, state, sandbox, id);
    CREATE TABLE position (time_us INTEGER NOT NULL) STRICT;
    PRAGMA user_version = 1;
";
/// Maximum wait for a lock of the database.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Open database. All methods block.
#[derive(Debug)]
pub(crate) struct Database {
    path: PathBuf,
    connection: Mutex<Connection>,
}

impl Database {
    /// Opens or creates the database in the data directory `home`.
    pub fn open(home: &Path) -> Result<Self, WebhookError> {
        let path = home.join("webhooks.db");
        let failed = |source| WebhookError::Database {
            path: path.clone(),
            source,
        };
        // Created with mode 0600 before SQLite opens the file. SQLite reports an error.
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).mode(0o600);
        let _ = file.open(&path);
        let connection = Connection::open(&path).map_err(failed)?;
        connection.busy_timeout(BUSY_TIMEOUT).map_err(failed)?;
        for (name, value) in [
            ("journal_mode", "WAL"),
            // An acknowledged webhook survives a power failure.
            ("synchronous", "FULL"),
            ("foreign_keys", "ON"),
            ("secure_delete", "ON"),
        ] {
            let set = connection.pragma_update(None, name, value);
            set.map_err(failed)?;
        }
        let found: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(failed)?;
        match found {
            0 => connection.execute_batch(&format!("BEGIN; {SCHEMA} COMMIT;")),
            SCHEMA_VERSION => Ok(()),
            _ => return Err(WebhookError::Version { path, found }),
        }
        .map_err(failed)?;
        Ok(Self {
            path,
            connection: Mutex::new(connection),
        })
    }

    /// Returns the connection, for one operation.
    pub fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock()
    }

    /// Adds the path of the database to an error.
    pub fn failed(&self, source: rusqlite::Error) -> WebhookError {
        WebhookError::Database {
            path: self.path.clone(),
            source,
        }
    }
}
