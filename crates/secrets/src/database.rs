//! Database of the secrets of one host: `<home>/secrets.db`.

use crate::secret::MAX_SECRETS;
use crate::secrets::unknown;
use crate::shared::{SealedValue, StoredSecret};
use crate::{Secret, SecretError};
use jiffy_database::{DURABLE, Schema, open};
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Schema. The owner is the id of an API key; empty for the owner of the host.
const SCHEMA: Schema = Schema {
    version: 1,
    tables: "
    CREATE TABLE secrets (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        version INTEGER NOT NULL,
        value BLOB NOT NULL,
        metadata TEXT NOT NULL,
        created_ms INTEGER NOT NULL,
        updated_ms INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) STRICT;
",
};
/// Columns that [`secret`] reads by position.
const COLUMNS: &str = "id, name, version, metadata, created_ms, updated_ms";

/// Open database. All methods block.
#[derive(Debug)]
pub(crate) struct Database {
    path: PathBuf,
    connection: Mutex<Connection>,
}

fn secret(row: &Row<'_>) -> rusqlite::Result<Secret> {
    let metadata: String = row.get(3)?;
    Ok(Secret {
        id: row.get(0)?,
        name: row.get(1)?,
        version: row.get(2)?,
        // This program wrote the text.
        metadata: serde_json::from_str(&metadata).unwrap_or_default(),
        created_ms: row.get(4)?,
        updated_ms: row.get(5)?,
    })
}

fn text(metadata: &BTreeMap<String, String>) -> String {
    // A map of texts can always be encoded.
    serde_json::to_string(metadata).unwrap_or_default()
}

impl Database {
    /// Returns the path of the database in the data directory `home`.
    pub fn path(home: &Path) -> PathBuf {
        home.join("secrets.db")
    }

    /// Opens or creates the database in the data directory `home`.
    pub fn open(home: &Path) -> Result<Self, SecretError> {
        let path = Self::path(home);
        let connection = open(&path, &SCHEMA, DURABLE)?;
        Ok(Self {
            path,
            connection: Mutex::new(connection),
        })
    }

    fn failed(&self) -> impl Fn(rusqlite::Error) -> SecretError + '_ {
        |source| SecretError::Database {
            path: self.path.clone(),
            source,
        }
    }

    /// Stores a new secret.
    pub fn create(&self, created: &StoredSecret) -> Result<(), SecretError> {
        let StoredSecret {
            owner,
            secret,
            value,
        } = created;
        let failed = self.failed();
        let mut connection = self.connection.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let tx = tx.map_err(&failed)?;
        // Number of secrets of the owner, and whether one of them has this name.
        let (count, exists): (usize, bool) = tx
            .query_row(
                "SELECT count(*), coalesce(max(name = ?2), 0) FROM secrets WHERE owner = ?1",
                params![owner, secret.name],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
            .map_err(&failed)?;
        if exists {
            return Err(SecretError::Exists(secret.name.clone()));
        }
        if count >= MAX_SECRETS {
            return Err(SecretError::Full);
        }
        tx.execute(
            "INSERT INTO secrets (id, owner, name, version, value, metadata, created_ms, updated_ms)
                VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            params![
                secret.id,
                owner,
                secret.name,
                secret.version,
                value,
                text(&secret.metadata),
                secret.created_ms,
                secret.updated_ms
            ],
        )
        .map_err(&failed)?;
        tx.commit().map_err(&failed)
    }

    /// Changes a secret of `owner`. `change` changes the secret and returns its encrypted value.
    pub fn update(
        &self,
        owner: &str,
        which: &str,
        change: impl FnOnce(&mut Secret) -> Result<Vec<u8>, SecretError>,
    ) -> Result<Secret, SecretError> {
        let failed = self.failed();
        let mut connection = self.connection.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let tx = tx.map_err(&failed)?;
        let mut changed = find(&tx, owner, which)
            .map_err(&failed)?
            .ok_or_else(|| unknown(which))?;
        let value = change(&mut changed)?;
        tx.execute(
            "UPDATE secrets SET version = ?2, value = ?3, metadata = ?4, updated_ms = ?5
                WHERE id = ?1",
            params![
                changed.id,
                changed.version,
                value,
                text(&changed.metadata),
                changed.updated_ms
            ],
        )
        .map_err(&failed)?;
        tx.commit().map_err(&failed)?;
        Ok(changed)
    }

    /// Returns a secret of `owner`. `which` is an id or a name.
    pub fn get(&self, owner: &str, which: &str) -> Result<Option<Secret>, SecretError> {
        find(&self.connection.lock(), owner, which).map_err(self.failed())
    }

    /// Returns at most `limit` secrets of `owner` in the order of their names, after the name
    /// `after`.
    pub fn list(&self, owner: &str, after: &str, limit: usize) -> Result<Vec<Secret>, SecretError> {
        let connection = self.connection.lock();
        let select = || {
            let mut statement = connection.prepare_cached(&format!(
                "SELECT {COLUMNS} FROM secrets WHERE owner = ?1 AND name > ?2 ORDER BY name LIMIT ?3"
            ))?;
            let all = statement.query_map(params![owner, after, limit], secret)?;
            all.collect::<rusqlite::Result<Vec<Secret>>>()
        };
        select().map_err(self.failed())
    }

    /// Removes a secret of `owner`. `which` is an id or a name. Returns the removed secret.
    pub fn remove(&self, owner: &str, which: &str) -> Result<Option<Secret>, SecretError> {
        let failed = self.failed();
        let mut connection = self.connection.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let tx = tx.map_err(&failed)?;
        let Some(removed) = find(&tx, owner, which).map_err(&failed)? else {
            return Ok(None);
        };
        tx.execute("DELETE FROM secrets WHERE id = ?1", params![removed.id])
            .map_err(&failed)?;
        tx.commit().map_err(&failed)?;
        Ok(Some(removed))
    }

    /// Removes all secrets of `owner`. Returns them.
    pub fn remove_all(&self, owner: &str) -> Result<Vec<Secret>, SecretError> {
        let connection = self.connection.lock();
        let delete = || {
            let statement = format!("DELETE FROM secrets WHERE owner = ?1 RETURNING {COLUMNS}");
            let mut statement = connection.prepare_cached(&statement)?;
            let all = statement.query_map(params![owner], secret)?;
            all.collect::<rusqlite::Result<Vec<Secret>>>()
        };
        delete().map_err(self.failed())
    }

    /// Returns all secrets.
    pub fn all(&self) -> Result<Vec<StoredSecret>, SecretError> {
        let connection = self.connection.lock();
        let select = || {
            let mut statement = connection.prepare_cached(&format!(
                "SELECT {COLUMNS}, owner, value FROM secrets ORDER BY created_ms, id"
            ))?;
            let all = statement.query_map([], |row| {
                Ok(StoredSecret {
                    secret: secret(row)?,
                    owner: row.get(6)?,
                    value: row.get(7)?,
                })
            })?;
            all.collect::<rusqlite::Result<Vec<_>>>()
        };
        select().map_err(self.failed())
    }

    /// Returns the encrypted value of the secret of `owner` with this name.
    pub fn value(&self, owner: &str, name: &str) -> Result<Option<SealedValue>, SecretError> {
        let row = self.connection.lock().query_row(
            "SELECT id, version, value FROM secrets WHERE owner = ?1 AND name = ?2",
            params![owner, name],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
        );
        row.optional().map_err(self.failed())
    }
}

/// Finds a secret of `owner` by id or name.
fn find(connection: &Connection, owner: &str, which: &str) -> rusqlite::Result<Option<Secret>> {
    // Ids contain lower-case letters only, so that both forms can be compared in lower case.
    let which = which.to_ascii_lowercase();
    let mut statement = connection.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM secrets WHERE owner = ?1 AND (id = ?2 OR name = ?2)"
    ))?;
    statement
        .query_row(params![owner, which], secret)
        .optional()
}
