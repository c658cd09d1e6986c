//! [`Secrets`]: the secrets of all API keys of one host, in `<home>/secrets.db`, encrypted.

use crate::host_key::HostKey;
use crate::secret::{ID_PREFIX, MAX_SECRETS, check_metadata, check_value, checked_name};
use crate::{NewSecret, Secret, SecretError};
use jiffy_database::{DURABLE, Schema, open};
use jiffy_engine_api::{new_id, now_ms};
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zeroize::Zeroizing;

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

/// Secrets of one host. Clones share the database. All methods block.
#[derive(Debug, Clone)]
pub struct Secrets {
    key: HostKey,
    path: PathBuf,
    connection: Arc<Mutex<Connection>>,
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

/// Returns the context of an encrypted value: it cannot be moved to another owner or secret, and
/// not be replaced by an earlier value.
fn context(owner: &str, id: &str, version: u64) -> String {
    format!("secret {owner} {id} {version}")
}

fn text(metadata: &BTreeMap<String, String>) -> String {
    // A map of texts can always be encoded.
    serde_json::to_string(metadata).unwrap_or_default()
}

impl Secrets {
    /// Opens or creates the secrets of the data directory `home`.
    pub fn open(home: &Path) -> Result<Self, SecretError> {
        let key = HostKey::open(home)?;
        let path = home.join("secrets.db");
        let connection = open(&path, &SCHEMA, DURABLE)?;
        let connection = Arc::new(Mutex::new(connection));
        Ok(Self {
            key,
            path,
            connection,
        })
    }

    fn failed(&self) -> impl Fn(rusqlite::Error) -> SecretError + '_ {
        |source| SecretError::Database {
            path: self.path.clone(),
            source,
        }
    }

    /// Returns the key with which the secrets are encrypted.
    #[must_use]
    pub fn host_key(&self) -> &HostKey {
        &self.key
    }

    /// Stores a new secret of `owner`, which is empty for the owner of the host.
    pub fn create(&self, owner: &str, new: &NewSecret) -> Result<Secret, SecretError> {
        let name = checked_name(&new.name)?;
        check_value(&new.value)?;
        check_metadata(&new.metadata)?;
        let now = now_ms();
        let created = Secret {
            id: format!("{ID_PREFIX}{}", new_id()?),
            name,
            version: 1,
            metadata: new.metadata.clone(),
            created_ms: now,
            updated_ms: now,
        };
        let value = self
            .key
            .seal(&context(owner, &created.id, 1), new.value.as_bytes())?;
        let failed = self.failed();
        let mut connection = self.connection.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let tx = tx.map_err(&failed)?;
        // Number of secrets of the owner, and whether one of them has this name.
        let (count, exists): (usize, bool) = tx
            .query_row(
                "SELECT count(*), coalesce(max(name = ?2), 0) FROM secrets WHERE owner = ?1",
                params![owner, created.name],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
            .map_err(&failed)?;
        if exists {
            return Err(SecretError::Exists(created.name));
        }
        if count >= MAX_SECRETS {
            return Err(SecretError::Full);
        }
        tx.execute(
            "INSERT INTO secrets (id, owner, name, version, value, metadata, created_ms, updated_ms)
                VALUES (?1, ?2, ?3, 1, ?4, ?5, ?6, ?6)",
            params![
                created.id,
                owner,
                created.name,
                value,
                text(&created.metadata),
                now
            ],
        )
        .map_err(&failed)?;
        tx.commit().map_err(&failed)?;
        Ok(created)
    }

    /// Replaces the value of a secret of `owner`, and the metadata if given. `which` is an id or a
    /// name.
    pub fn update(
        &self,
        owner: &str,
        which: &str,
        value: &str,
        metadata: Option<&BTreeMap<String, String>>,
    ) -> Result<Secret, SecretError> {
        check_value(value)?;
        metadata.map(check_metadata).transpose()?;
        let failed = self.failed();
        let mut connection = self.connection.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let tx = tx.map_err(&failed)?;
        let mut changed = find(&tx, owner, which)
            .map_err(&failed)?
            .ok_or_else(|| unknown(which))?;
        changed.version = changed.version.saturating_add(1);
        // The time of the last change never decreases, also if the clock was set back.
        changed.updated_ms = now_ms().max(changed.updated_ms);
        if let Some(metadata) = metadata {
            changed.metadata.clone_from(metadata);
        }
        let sealed = self.key.seal(
            &context(owner, &changed.id, changed.version),
            value.as_bytes(),
        )?;
        tx.execute(
            "UPDATE secrets SET version = ?2, value = ?3, metadata = ?4, updated_ms = ?5
                WHERE id = ?1",
            params![
                changed.id,
                changed.version,
                sealed,
                text(&changed.metadata),
                changed.updated_ms
            ],
        )
        .map_err(&failed)?;
        tx.commit().map_err(&failed)?;
        Ok(changed)
    }

    /// Returns a secret of `owner`. `which` is an id or a name.
    pub fn get(&self, owner: &str, which: &str) -> Result<Secret, SecretError> {
        let connection = self.connection.lock();
        let found = find(&connection, owner, which).map_err(self.failed())?;
        found.ok_or_else(|| unknown(which))
    }

    /// Returns at most `limit` secrets of `owner` in the order of their names, after the name
    /// `after`.
    pub fn list(
        &self,
        owner: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<Secret>, SecretError> {
        let connection = self.connection.lock();
        let select = || {
            let mut statement = connection.prepare_cached(&format!(
                "SELECT {COLUMNS} FROM secrets WHERE owner = ?1 AND name > ?2 ORDER BY name LIMIT ?3"
            ))?;
            let all =
                statement.query_map(params![owner, after.unwrap_or_default(), limit], secret)?;
            all.collect::<rusqlite::Result<Vec<Secret>>>()
        };
        select().map_err(self.failed())
    }

    /// Removes a secret of `owner`. `which` is an id or a name. Returns the removed secret.
    pub fn remove(&self, owner: &str, which: &str) -> Result<Secret, SecretError> {
        let failed = self.failed();
        let mut connection = self.connection.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let tx = tx.map_err(&failed)?;
        let removed = find(&tx, owner, which)
            .map_err(&failed)?
            .ok_or_else(|| unknown(which))?;
        tx.execute("DELETE FROM secrets WHERE id = ?1", params![removed.id])
            .map_err(&failed)?;
        tx.commit().map_err(&failed)?;
        Ok(removed)
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

    /// Returns the value of the secret of `owner` with this name. `None` if the secret does not
    /// exist.
    pub fn value(&self, owner: &str, name: &str) -> Result<Option<Zeroizing<String>>, SecretError> {
        let name = name.to_ascii_lowercase();
        let row = self
            .connection
            .lock()
            .query_row(
                "SELECT id, version, value FROM secrets WHERE owner = ?1 AND name = ?2",
                params![owner, name],
                |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
            )
            .optional()
            .map_err(self.failed())?;
        let Some((id, version, sealed)): Option<(String, u64, Vec<u8>)> = row else {
            return Ok(None);
        };
        let plain = self.key.open_sealed(&context(owner, &id, version), &sealed);
        let value = plain.and_then(|plain| {
            let text = std::str::from_utf8(&plain).ok()?;
            Some(Zeroizing::new(text.to_owned()))
        });
        value.map(Some).ok_or(SecretError::Sealed(name))
    }
}

fn unknown(which: &str) -> SecretError {
    let shown: String = which.chars().take(crate::MAX_SECRET_NAME).collect();
    SecretError::Unknown(shown.escape_debug().to_string())
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn new(name: &str, value: &str) -> NewSecret {
        NewSecret {
            name: name.to_owned(),
            value: Zeroizing::new(value.to_owned()),
            metadata: BTreeMap::new(),
        }
    }

    #[test]
    fn secrets_are_found_by_their_owner_only_and_persist() {
        let home = tempfile::tempdir().unwrap();
        let secrets = Secrets::open(home.path()).unwrap();
        let made = secrets.create("a", &new("API-Token", "one")).unwrap();
        assert_eq!((made.name.as_str(), made.version), ("api-token", 1));
        assert!(made.id.starts_with(ID_PREFIX));
        secrets.create("b", &new("api-token", "other")).unwrap();
        let twice = secrets.create("a", &new("api-token", "x"));
        assert!(matches!(twice, Err(SecretError::Exists(_))));
        assert!(matches!(
            secrets.get("b", &made.id),
            Err(SecretError::Unknown(_))
        ));
        let changed = secrets.update("a", &made.id, "two", None).unwrap();
        assert_eq!(changed.version, 2);
        drop(secrets);
        let secrets = Secrets::open(home.path()).unwrap();
        assert_eq!(secrets.get("a", "API-TOKEN").unwrap(), changed);
        let value = |owner: &str| secrets.value(owner, "api-token").unwrap();
        assert_eq!(value("a").unwrap().as_str(), "two");
        assert_eq!(value("b").unwrap().as_str(), "other");
        secrets.remove("a", "api-token").unwrap();
        assert!(value("a").is_none());
        assert_eq!(secrets.remove_all("b").unwrap().len(), 1);
        assert!(value("b").is_none());
    }

    #[test]
    fn values_are_encrypted_on_disk_and_cannot_be_exchanged() {
        let home = tempfile::tempdir().unwrap();
        let secrets = Secrets::open(home.path()).unwrap();
        let value = "value-that-must-not-be-found-on-disk";
        secrets.create("a", &new("one", value)).unwrap();
        secrets.create("b", &new("two", "its own value")).unwrap();
        for entry in std::fs::read_dir(home.path()).unwrap() {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            let found = bytes.windows(value.len()).any(|w| w == value.as_bytes());
            assert!(!found);
        }
        let exchange = "UPDATE secrets SET value = (SELECT value FROM secrets WHERE name = 'one')
            WHERE name = 'two'";
        secrets.connection.lock().execute(exchange, []).unwrap();
        assert!(matches!(
            secrets.value("b", "two"),
            Err(SecretError::Sealed(_))
        ));
    }

    #[test]
    fn names_values_and_their_number_are_bounded() {
        let home = tempfile::tempdir().unwrap();
        let secrets = Secrets::open(home.path()).unwrap();
        for name in [
            "",
            "a b",
            "a/b",
            "sec_x",
            "SEC_x",
            "é",
            "a\n",
            &"a".repeat(129),
        ] {
            let made = secrets.create("a", &new(name, "x"));
            assert!(matches!(made, Err(SecretError::Name(_))), "{name}");
        }
        for value in ["", "a\r\nb", "a\0b", "a\n", " a", &"a".repeat(8193)] {
            let made = secrets.create("a", &new("n", value));
            assert!(matches!(made, Err(SecretError::Value)), "{value:?}");
        }
        for number in 0..MAX_SECRETS {
            secrets
                .create("a", &new(&format!("n{number}"), "x"))
                .unwrap();
        }
        let more = secrets.create("a", &new("more", "x"));
        assert!(matches!(more, Err(SecretError::Full)));
        secrets.create("b", &new("more", "x")).unwrap();
        // Names are ordered as texts: only `n99` follows `n98`.
        let page = secrets.list("a", Some("n98"), 3).unwrap();
        assert_eq!(page.len(), 1);
    }
}
