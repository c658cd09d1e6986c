//! API keys: who may call, and how much they may have.
//!
//! They live in `<home>/keys.db`, which the daemon and `jiffy key` open side by side: every call looks its key up there, so a
//! revocation is in force with the next call. Only a key's SHA-256 is stored. The lookup is by that hash, so how long it takes tells
//! nothing about any key.

use jiffy_host::{IdentityError, new_id, new_token};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Every key begins so; clients of older versions insist on it.
const PREFIX: &str = "e2b_";
const VERSION: i64 = 1;
/// How exactly the last use of a key is known.
const USE_NOTED: Duration = Duration::from_secs(60);
/// How long a change by another process is waited for.
const BUSY: Duration = Duration::from_secs(5);
/// Longest name of a key.
const MAX_NAME: usize = 100;

const TABLE: &str = "
    CREATE TABLE keys (
        id TEXT PRIMARY KEY,
        hash BLOB NOT NULL UNIQUE,
        name TEXT NOT NULL,
        scope TEXT NOT NULL,
        max_sandboxes INTEGER,
        max_vcpus INTEGER,
        max_memory_mib INTEGER,
        creates_per_minute INTEGER,
        created_ms INTEGER NOT NULL,
        used_ms INTEGER,
        revoked_ms INTEGER
    ) STRICT;
";
const COLUMNS: &str = "id, name, scope, max_sandboxes, max_vcpus, max_memory_mib, \
    creates_per_minute, created_ms, used_ms, revoked_ms";

/// Why keys cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// SQLite says no.
    #[error("the keys in {} cannot be used: {source}; check that the disk is writable and not full", path.display())]
    Database {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// The file system says no.
    #[error("cannot write {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// From another version.
    #[error("{} has version {found}, and this program reads version {VERSION}: use the version of jiffy that wrote it, or move it away", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// What it says.
        found: i64,
    },
    /// No random bytes.
    #[error(transparent)]
    Entropy(#[from] IdentityError),
    /// A name that is empty, too long or not printable.
    #[error("`{0}` is not a name for a key: use 1 to {MAX_NAME} printable characters")]
    Name(String),
    /// No such key.
    #[error("there is no key `{0}` that could be revoked; `jiffy key ls` shows those there are")]
    Unknown(String),
}

/// What a key is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Everything on this host, also other keys' sandboxes, templates and pools.
    Admin,
    /// Sandboxes of its own.
    Create,
    /// Looks at everything, without secrets, and changes nothing.
    Read,
}

impl Scope {
    /// One word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Create => "create",
            Self::Read => "read",
        }
    }

    /// The scope of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Admin, Self::Create, Self::Read];
        all.into_iter().find(|s| s.name() == name)
    }
}

/// How much the sandboxes of a key may be at once; none: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Running sandboxes.
    pub max_sandboxes: Option<u32>,
    /// Their virtual CPUs together.
    pub max_vcpus: Option<u32>,
    /// Their memory together, in MiB.
    pub max_memory_mib: Option<u32>,
    /// New sandboxes in any 60 s.
    pub creates_per_minute: Option<u32>,
}

/// A key, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Key {
    /// Letters and digits; sandboxes name their key by it.
    pub id: String,
    /// What somebody called it.
    pub name: String,
    /// What it is good for.
    pub scope: Scope,
    /// How much it may have.
    pub limits: Limits,
    /// Milliseconds since 1970.
    pub created_ms: u64,
    /// When it was last used, to the minute, in milliseconds since 1970.
    pub used_ms: Option<u64>,
    /// When it was revoked, in milliseconds since 1970.
    pub revoked_ms: Option<u64>,
}

/// A key that was just made: the only moment its secret is known.
#[derive(Debug, Clone, Serialize)]
pub struct NewKey {
    /// The key.
    #[serde(flatten)]
    pub key: Key,
    /// What its holder shows.
    pub secret: String,
}

/// The keys of one host.
#[derive(Debug)]
pub struct Keys {
    path: PathBuf,
    connection: Mutex<Connection>,
    /// When a use was last written down, by id.
    noted: Mutex<HashMap<String, Instant>>,
}

impl Keys {
    /// Opens or creates `<home>/keys.db`.
    pub fn open(home: &Path) -> Result<Self, KeyError> {
        let path = home.join("keys.db");
        // Made here, so that nobody else can read it from its first moment on.
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).mode(0o600);
        file.open(&path).map_err(|source| KeyError::File {
            path: path.clone(),
            source,
        })?;
        let failed = |source| KeyError::Database {
            path: path.clone(),
            source,
        };
        let mut connection = Connection::open(&path).map_err(failed)?;
        connection.busy_timeout(BUSY).map_err(failed)?;
        connection
            .pragma_update(None, "journal_mode", "WAL")
            .map_err(failed)?;
        let tx = connection
            .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
            .map_err(failed)?;
        let found: i64 = tx
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(failed)?;
        match found {
            0 => tx
                .execute_batch(TABLE)
                .and_then(|()| tx.pragma_update(None, "user_version", VERSION))
                .and_then(|()| tx.commit())
                .map_err(failed)?,
            VERSION => drop(tx),
            found => return Err(KeyError::Version { path, found }),
        }
        Ok(Self {
            path,
            connection: Mutex::new(connection),
            noted: Mutex::default(),
        })
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        let connection = self.connection.lock();
        connection.unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, source: rusqlite::Error) -> KeyError {
        KeyError::Database {
            path: self.path.clone(),
            source,
        }
    }

    /// Makes a key.
    pub fn create(&self, name: &str, scope: Scope, limits: Limits) -> Result<NewKey, KeyError> {
        let printable = !name.chars().any(char::is_control);
        if name.is_empty() || name.chars().count() > MAX_NAME || !printable {
            return Err(KeyError::Name(name.escape_debug().to_string()));
        }
        let secret = format!("{PREFIX}{}", new_token()?);
        let key = Key {
            id: new_id()?,
            name: name.to_owned(),
            scope,
            limits,
            created_ms: now_ms(),
            used_ms: None,
            revoked_ms: None,
        };
        self.connection()
            .execute(
                "INSERT INTO keys (id, hash, name, scope, max_sandboxes, max_vcpus, max_memory_mib,
                    creates_per_minute, created_ms) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
                params![
                    key.id,
                    hash(&secret),
                    key.name,
                    scope.name(),
                    limits.max_sandboxes,
                    limits.max_vcpus,
                    limits.max_memory_mib,
                    limits.creates_per_minute,
                    stored(key.created_ms),
                ],
            )
            .map_err(|e| self.failed(e))?;
        Ok(NewKey { key, secret })
    }

    /// All keys, oldest first, also those that were revoked.
    pub fn list(&self) -> Result<Vec<Key>, KeyError> {
        let connection = self.connection();
        let read = || -> rusqlite::Result<Vec<Key>> {
            let query = format!("SELECT {COLUMNS} FROM keys ORDER BY rowid");
            let mut statement = connection.prepare_cached(&query)?;
            let keys = statement.query_map([], key)?;
            keys.collect()
        };
        read().map_err(|e| self.failed(e))
    }

    /// The key with this id, if it is in force.
    pub(crate) fn in_force(&self, id: &str) -> Result<Option<Key>, KeyError> {
        let connection = self.connection();
        let read = || -> rusqlite::Result<Option<Key>> {
            let query = format!("SELECT {COLUMNS} FROM keys WHERE id = ?1 AND revoked_ms IS NULL");
            let mut statement = connection.prepare_cached(&query)?;
            statement.query_row([id], key).optional()
        };
        read().map_err(|e| self.failed(e))
    }

    /// Revokes a key by its id, or by its name if only one that is in force has it. Its sandboxes stay.
    pub fn revoke(&self, which: &str) -> Result<Key, KeyError> {
        let unknown = || KeyError::Unknown(which.escape_debug().to_string());
        let mut live: Vec<Key> = self.list()?;
        live.retain(|k| k.revoked_ms.is_none() && (k.id == which || k.name == which));
        let found = match live.iter().position(|k| k.id == which) {
            Some(exact) => live.swap_remove(exact),
            None if live.len() == 1 => live.swap_remove(0),
            None => return Err(unknown()),
        };
        let now = now_ms();
        let changed = self.connection().execute(
            "UPDATE keys SET revoked_ms = ?2 WHERE id = ?1 AND revoked_ms IS NULL",
            params![found.id, stored(now)],
        );
        match changed.map_err(|e| self.failed(e))? {
            0 => Err(unknown()),
            _ => Ok(Key {
                revoked_ms: Some(now),
                ..found
            }),
        }
    }

    /// The key with this secret, if it is in force.
    pub fn check(&self, secret: &str) -> Result<Option<Key>, KeyError> {
        let found = {
            let connection = self.connection();
            let read = || -> rusqlite::Result<Option<Key>> {
                let query =
                    format!("SELECT {COLUMNS} FROM keys WHERE hash = ?1 AND revoked_ms IS NULL");
                let mut statement = connection.prepare_cached(&query)?;
                statement.query_row([hash(secret)], key).optional()
            };
            read().map_err(|e| self.failed(e))?
        };
        if let Some(key) = &found
            && self.is_to_be_noted(&key.id)
        {
            // A use that cannot be written down is no reason to refuse.
            let noted = self.connection().execute(
                "UPDATE keys SET used_ms = ?2 WHERE id = ?1",
                params![key.id, stored(now_ms())],
            );
            if let Err(e) = noted {
                tracing::warn!("the use of key {} is not noted: {e}", key.id);
            }
        }
        Ok(found)
    }

    fn is_to_be_noted(&self, id: &str) -> bool {
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        match noted.get(id) {
            Some(at) if now.duration_since(*at) < USE_NOTED => false,
            _ => {
                noted.insert(id.to_owned(), now);
                true
            }
        }
    }
}

/// The key of this host's owner in `<home>/api-key`, made at the first start: its secret, and whether it is new. One whose key was
/// revoked is not made again.
pub fn local_key(home: &Path, keys: &Keys) -> Result<(String, bool), KeyError> {
    let path = home.join("api-key");
    let failed = |source| KeyError::File {
        path: path.clone(),
        source,
    };
    match fs::read_to_string(&path) {
        Ok(secret) => return Ok((secret.trim().to_owned(), false)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(failed(e)),
    }
    let made = keys.create("local", Scope::Admin, Limits::default())?;
    // Whole or not at all.
    let new = home.join(".new-api-key");
    let mut options = OpenOptions::new();
    options.create(true).truncate(true).write(true).mode(0o600);
    let mut file = options.open(&new).map_err(failed)?;
    writeln!(file, "{}", made.secret).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    fs::rename(&new, &path).map_err(failed)?;
    Ok((made.secret, true))
}

fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret).into()
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

/// SQLite's integers are signed.
fn stored(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

fn key(row: &Row<'_>) -> rusqlite::Result<Key> {
    let ms = |i: usize| -> rusqlite::Result<Option<u64>> {
        let ms: Option<i64> = row.get(i)?;
        Ok(ms.and_then(|ms| u64::try_from(ms).ok()))
    };
    let scope: String = row.get(2)?;
    Ok(Key {
        id: row.get(0)?,
        name: row.get(1)?,
        // A scope that a newer version wrote is the least there is.
        scope: Scope::from_name(&scope).unwrap_or(Scope::Read),
        limits: Limits {
            max_sandboxes: row.get(3)?,
            max_vcpus: row.get(4)?,
            max_memory_mib: row.get(5)?,
            creates_per_minute: row.get(6)?,
        },
        created_ms: ms(7)?.unwrap_or(0),
        used_ms: ms(8)?,
        revoked_ms: ms(9)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_key_is_known_by_its_secret_until_another_process_revokes_it() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Keys::open(dir.path()).unwrap();
        let command = Keys::open(dir.path()).unwrap();
        let limits = Limits {
            max_vcpus: Some(8),
            ..Limits::default()
        };
        let made = command.create("ci", Scope::Create, limits).unwrap();
        let hex = made.secret.strip_prefix("e2b_").unwrap();
        assert!(hex.len() == 40 && hex.bytes().all(|b| b"0123456789abcdef".contains(&b)));
        assert_eq!(daemon.check(&made.secret).unwrap().unwrap(), made.key);
        assert!(daemon.check("e2b_0").unwrap().is_none());
        assert!(command.list().unwrap()[0].used_ms.is_some());
        command.revoke("ci").unwrap();
        assert!(daemon.check(&made.secret).unwrap().is_none());
        assert!(command.revoke(&made.key.id).is_err(), "once is enough");
    }

    #[test]
    fn the_file_holds_no_secret_and_is_its_owners() {
        let dir = tempfile::tempdir().unwrap();
        let keys = Keys::open(dir.path()).unwrap();
        let made = keys.create("x", Scope::Admin, Limits::default()).unwrap();
        for file in fs::read_dir(dir.path()).unwrap() {
            let path = file.unwrap().path();
            assert_eq!(mode(&path), 0o600, "{path:?}");
            let bytes = fs::read(&path).unwrap();
            let needle = &made.secret.as_bytes()[PREFIX.len()..];
            assert!(!bytes.windows(needle.len()).any(|w| w == needle));
        }
    }

    #[test]
    fn a_name_that_two_keys_have_revokes_neither() {
        let dir = tempfile::tempdir().unwrap();
        let keys = Keys::open(dir.path()).unwrap();
        let first = keys.create("a", Scope::Read, Limits::default()).unwrap();
        keys.create("a", Scope::Read, Limits::default()).unwrap();
        assert!(matches!(keys.revoke("a"), Err(KeyError::Unknown(_))));
        keys.revoke(&first.key.id).unwrap();
        keys.revoke("a").unwrap();
        let bad =
            ["", "a\nb", &"x".repeat(101)].map(|n| keys.create(n, Scope::Read, Limits::default()));
        assert!(bad.iter().all(|b| matches!(b, Err(KeyError::Name(_)))));
    }

    #[test]
    fn the_local_key_is_made_once_and_is_the_owners() {
        let dir = tempfile::tempdir().unwrap();
        let keys = Keys::open(dir.path()).unwrap();
        let (secret, new) = local_key(dir.path(), &keys).unwrap();
        assert!(new && keys.check(&secret).unwrap().unwrap().scope == Scope::Admin);
        assert_eq!(local_key(dir.path(), &keys).unwrap(), (secret, false));
        assert_eq!(mode(&dir.path().join("api-key")), 0o600);
    }
}
