//! Database of webhooks and deliveries: `<home>/webhooks.db`.

use crate::WebhookError;
use jiffy_database::{DURABLE, Schema, open};
use parking_lot::{Mutex, MutexGuard};
use rusqlite::Connection;
use std::path::{Path, PathBuf};

/// Schema. The owner is the id of an API key; empty for the owner of the host. `since_us` is the
/// time of the newest event when a webhook was created or enabled. `state` is 0 for a pending
/// delivery, 1 for a failed one. `position` has one row: the time of the last queued event.
const SCHEMA: Schema = Schema {
    version: 1,
    tables: "
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
",
};

/// Open database. All methods block.
#[derive(Debug)]
pub(crate) struct Database {
    path: PathBuf,
    connection: Mutex<Connection>,
}

impl Database {
    /// Returns the path of the database in the data directory `home`.
    pub fn path(home: &Path) -> PathBuf {
        home.join("webhooks.db")
    }

    /// Opens or creates the database in the data directory `home`.
    pub fn open(home: &Path) -> Result<Self, WebhookError> {
        let path = Self::path(home);
        let connection = open(&path, &SCHEMA, DURABLE)?;
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
