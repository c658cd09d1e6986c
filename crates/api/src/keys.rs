//! API keys: authentication, scopes and limits.
//!
//! Keys are stored in `<home>/keys.db`, which the daemon and `jiffy key` open concurrently. Every
//! request looks up its key there, so a revocation takes effect with the next request. Only the
//! SHA-256 of a secret is stored. Keys are looked up by this hash, so the duration of a look-up
//! reveals nothing about a key.

mod check;
mod key_status;
mod revoke;

pub use check::Verdict;
pub use key_status::KeyStatus;

use check::networks;
use jiffy_engine_api::{IdentityError, new_id, new_token, now_ms};
use key_status::KeyStatuses;
use parking_lot::{Mutex, MutexGuard};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Prefix of every secret; older client versions require it.
const SECRET_PREFIX: &str = "e2b_";
const SCHEMA_VERSION: i64 = 3;
/// Minimum time between two recordings of a key's use, which is therefore the precision of
/// `used_ms`.
const USE_PRECISION: Duration = Duration::from_secs(60);
/// Maximum wait for a transaction of another process.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a key's name in characters.
const MAX_NAME: usize = 100;
/// Maximum number of networks that a key may be used from.
const MAX_NETWORKS: usize = 64;

/// Schema of version 1. [`MIGRATIONS`] upgrades it to later versions, also in a new file.
const SCHEMA: &str = "
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
/// Schema migrations; the first upgrades version 1 to version 2.
const MIGRATIONS: &[&str] = &[
    "
    ALTER TABLE keys ADD COLUMN max_paused INTEGER;
    ALTER TABLE keys ADD COLUMN max_snapshots INTEGER;
    ALTER TABLE keys ADD COLUMN max_templates INTEGER;
    ALTER TABLE keys ADD COLUMN max_builds INTEGER;
    ALTER TABLE keys ADD COLUMN max_disk_mib INTEGER;
    ALTER TABLE keys ADD COLUMN max_exchanges INTEGER;
    ALTER TABLE keys ADD COLUMN expires_ms INTEGER;
    ALTER TABLE keys ADD COLUMN addresses TEXT;
    ALTER TABLE keys ADD COLUMN previous_hash BLOB;
    ALTER TABLE keys ADD COLUMN previous_until_ms INTEGER;
    CREATE INDEX keys_by_previous ON keys (previous_hash);
",
    "
    ALTER TABLE keys ADD COLUMN end_ms INTEGER;
",
];
/// Indexes that were added later and do not change the schema version.
const INDEXES: &str = "
    CREATE INDEX IF NOT EXISTS keys_by_end ON keys (end_ms) WHERE end_ms IS NOT NULL;
    CREATE INDEX IF NOT EXISTS keys_of_hosts ON keys (id) WHERE scope = 'admin';
";
const COLUMNS: &str = "id, name, scope, max_sandboxes, max_vcpus, max_memory_mib, \
    creates_per_minute, created_ms, used_ms, revoked_ms, max_paused, max_snapshots, \
    max_templates, max_builds, max_disk_mib, max_exchanges, expires_ms, addresses, end_ms";

/// Errors of reading or changing keys.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// SQLite failed.
    #[error("the keys in {} cannot be used: {source}; check that the disk is writable and not full", path.display())]
    Database {
        /// Path of the database.
        path: PathBuf,
        /// Cause.
        source: rusqlite::Error,
    },
    /// A file operation failed.
    #[error("cannot write {}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The file has an unknown schema version.
    #[error("{} has version {found}, and this program reads version {SCHEMA_VERSION}: use the \
        version of jiffy that wrote it, or move it away", path.display())]
    Version {
        /// Path of the database.
        path: PathBuf,
        /// Version in the file.
        found: i64,
    },
    /// Random bytes are not available.
    #[error(transparent)]
    Entropy(#[from] IdentityError),
    /// The name is empty, too long or not printable.
    #[error("`{0}` is not a name for a key: use 1 to {MAX_NAME} printable characters")]
    Name(String),
    /// The text is neither an address nor a network.
    #[error("`{0}` is not an address or network: use a form such as 192.0.2.7 or 10.1.0.0/16")]
    Network(String),
    /// Too many networks. Their number is limited because each request checks them.
    #[error("too many networks: a key may be bound to at most {MAX_NETWORKS}")]
    Networks,
    /// The expiry time is in the past.
    #[error("the expiry time of the key is in the past: use a later time")]
    Expired,
    /// No key matches.
    #[error(
        "key `{0}` does not exist, has expired or was revoked, or its name is ambiguous; use an id from `jiffy key ls`"
    )]
    Unknown(String),
}

/// Scope of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Full access to this host, including the sandboxes, templates and pools of other keys.
    Admin,
    /// Access to its own resources.
    Create,
    /// Read access to all resources, without secrets.
    Read,
}

impl Scope {
    /// Returns the name of the scope.
    pub fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Create => "create",
            Self::Read => "read",
        }
    }

    /// Returns the scope with the given name.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Admin, Self::Create, Self::Read];
        all.into_iter().find(|s| s.name() == name)
    }
}

/// Limits of a key. `None` means that the key has no limit of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Running sandboxes.
    pub max_sandboxes: Option<u32>,
    /// Virtual CPUs of the running sandboxes.
    pub max_vcpus: Option<u32>,
    /// Memory of the running sandboxes, in MiB.
    pub max_memory_mib: Option<u32>,
    /// New sandboxes within 60 s.
    pub creates_per_minute: Option<u32>,
    /// Paused sandboxes.
    pub max_paused: Option<u32>,
    /// Snapshots.
    pub max_snapshots: Option<u32>,
    /// Templates, counted by name and tag.
    pub max_templates: Option<u32>,
    /// Waiting and running template builds.
    pub max_builds: Option<u32>,
    /// Total disk space of paused sandboxes, snapshots, templates, uploads and build steps, in MiB.
    pub max_disk_mib: Option<u64>,
    /// Concurrent requests and streams to sandboxes.
    pub max_exchanges: Option<u32>,
}

/// A key, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Key {
    /// Id of letters and digits; sandboxes refer to their owner by this id.
    pub id: String,
    /// Name that its creator gave it.
    pub name: String,
    /// Scope of the key.
    pub scope: Scope,
    /// Limits of the key.
    pub limits: Limits,
    /// Creation time in milliseconds since 1970.
    pub created_ms: u64,
    /// Time of the last use, with a precision of one minute, in milliseconds since 1970.
    pub used_ms: Option<u64>,
    /// Time of the revocation, in milliseconds since 1970.
    pub revoked_ms: Option<u64>,
    /// Expiry time, in milliseconds since 1970. `None` if the key does not expire.
    pub expires_ms: Option<u64>,
    /// Client addresses that may use the key, as networks in CIDR notation. Empty if all addresses
    /// may.
    pub addresses: Vec<String>,
    /// Time at which the removal of all its resources was requested, in milliseconds since 1970.
    pub end_ms: Option<u64>,
}

/// Restrictions of a key to a period and to client addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Validity {
    /// Expiry time, in milliseconds since 1970. `None` if the key does not expire.
    pub expires_ms: Option<u64>,
    /// Client addresses and networks in CIDR notation. Empty if all addresses may use the key.
    pub addresses: Vec<String>,
}

/// A new key with its secret, which cannot be read again later.
#[derive(Debug, Clone, Serialize)]
pub struct NewKey {
    /// The key.
    #[serde(flatten)]
    pub key: Key,
    /// Secret that authenticates its holder.
    pub secret: String,
}

/// API keys of one host.
#[derive(Debug)]
pub struct Keys {
    path: PathBuf,
    connection: Mutex<Connection>,
    /// Separate connection for status checks, which must not wait for a writer.
    reader: Mutex<Connection>,
    /// Time at which a use was last recorded, by key id.
    recorded_uses: Mutex<HashMap<String, Instant>>,
    /// Cached statuses of keys.
    statuses: Mutex<KeyStatuses>,
}

impl Keys {
    /// Opens or creates `<home>/keys.db`.
    pub fn open(home: &Path) -> Result<Self, KeyError> {
        let path = home.join("keys.db");
        // Created with mode 0600 before SQLite opens the file, so that no other user can ever read
        // it.
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
        connection.busy_timeout(BUSY_TIMEOUT).map_err(failed)?;
        connection
            // Readers do not wait for a writer.
            .pragma_update(None, "journal_mode", "WAL")
            .map_err(failed)?;
        let tx = connection
            .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
            .map_err(failed)?;
        let found: i64 = tx
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(failed)?;
        if !(0..=SCHEMA_VERSION).contains(&found) {
            return Err(KeyError::Version { path, found });
        }
        if found < SCHEMA_VERSION {
            migrate(&tx, found).map_err(failed)?;
        }
        tx.execute_batch(INDEXES).map_err(failed)?;
        tx.commit().map_err(failed)?;
        let reader = Connection::open(&path).map_err(failed)?;
        reader.busy_timeout(BUSY_TIMEOUT).map_err(failed)?;
        Ok(Self {
            path,
            connection: Mutex::new(connection),
            reader: Mutex::new(reader),
            recorded_uses: Mutex::default(),
            statuses: Mutex::default(),
        })
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock()
    }

    fn failed(&self, source: rusqlite::Error) -> KeyError {
        KeyError::Database {
            path: self.path.clone(),
            source,
        }
    }

    /// Creates a key that does not expire and may be used from any address.
    pub fn create(&self, name: &str, scope: Scope, limits: Limits) -> Result<NewKey, KeyError> {
        self.create_within(name, scope, limits, &Validity::default())
    }

    /// Creates a key.
    pub fn create_within(
        &self,
        name: &str,
        scope: Scope,
        limits: Limits,
        validity: &Validity,
    ) -> Result<NewKey, KeyError> {
        let is_printable = !name.chars().any(char::is_control);
        if name.is_empty() || name.chars().count() > MAX_NAME || !is_printable {
            return Err(KeyError::Name(name.escape_debug().to_string()));
        }
        if validity.expires_ms.is_some_and(|at| at <= now_ms()) {
            return Err(KeyError::Expired);
        }
        let addresses = networks(&validity.addresses)?;
        let secret = format!("{SECRET_PREFIX}{}", new_token()?);
        let key = Key {
            id: new_id()?,
            name: name.to_owned(),
            scope,
            limits,
            created_ms: now_ms(),
            used_ms: None,
            revoked_ms: None,
            expires_ms: validity.expires_ms,
            addresses,
            end_ms: None,
        };
        self.connection()
            .execute(
                "INSERT INTO keys (id, hash, name, scope, max_sandboxes, max_vcpus, max_memory_mib,
                    creates_per_minute, created_ms, max_paused, max_snapshots, max_templates,
                    max_builds, max_disk_mib, max_exchanges, expires_ms, addresses)
                    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)",
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
                    limits.max_paused,
                    limits.max_snapshots,
                    limits.max_templates,
                    limits.max_builds,
                    limits.max_disk_mib.map(stored),
                    limits.max_exchanges,
                    key.expires_ms.map(stored),
                    (!key.addresses.is_empty()).then(|| key.addresses.join(" ")),
                ],
            )
            .map_err(|e| self.failed(e))?;
        self.invalidate_statuses();
        Ok(NewKey { key, secret })
    }

    /// Returns all keys, oldest first, including revoked keys.
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

    /// Returns the key with this id, unless it was revoked. Expired keys are included.
    pub(crate) fn in_force(&self, id: &str) -> Result<Option<Key>, KeyError> {
        let connection = self.connection();
        let read = || -> rusqlite::Result<Option<Key>> {
            let query = format!("SELECT {COLUMNS} FROM keys WHERE id = ?1 AND revoked_ms IS NULL");
            let mut statement = connection.prepare_cached(&query)?;
            statement.query_row([id], key).optional()
        };
        read().map_err(|e| self.failed(e))
    }

    /// Returns the scope of the key with this id, including revoked keys.
    pub(crate) fn scope_of(&self, id: &str) -> Result<Option<Scope>, KeyError> {
        let connection = self.connection();
        let read = || -> rusqlite::Result<Option<String>> {
            let mut statement =
                connection.prepare_cached("SELECT scope FROM keys WHERE id = ?1")?;
            statement.query_row([id], |row| row.get(0)).optional()
        };
        let scope = read().map_err(|e| self.failed(e))?;
        Ok(scope.as_deref().and_then(Scope::from_name))
    }

    fn should_record_use(&self, id: &str) -> bool {
        let mut uses = self.recorded_uses.lock();
        let now = Instant::now();
        match uses.get(id) {
            Some(at) if now.duration_since(*at) < USE_PRECISION => false,
            _ => {
                uses.insert(id.to_owned(), now);
                true
            }
        }
    }
}

/// Returns the path of `<home>/api-key`, the file with the key of the host's owner. Creates file
/// and key at the first start. A revoked key is not created again.
pub fn local_key(home: &Path, keys: &Keys) -> Result<PathBuf, KeyError> {
    let path = home.join("api-key");
    let failed = |source| KeyError::File {
        path: path.clone(),
        source,
    };
    match fs::read_to_string(&path) {
        Ok(_) => return Ok(path),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(failed(e)),
    }
    let created = keys.create("local", Scope::Admin, Limits::default())?;
    revoke::write_secret(&path, &created.secret)?;
    Ok(path)
}

pub(crate) fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret).into()
}

/// Converts to SQLite's signed integers.
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
        // An unknown scope, written by a newer version, becomes the scope with the fewest rights.
        scope: Scope::from_name(&scope).unwrap_or(Scope::Read),
        limits: Limits {
            max_sandboxes: row.get(3)?,
            max_vcpus: row.get(4)?,
            max_memory_mib: row.get(5)?,
            creates_per_minute: row.get(6)?,
            max_paused: row.get(10)?,
            max_snapshots: row.get(11)?,
            max_templates: row.get(12)?,
            max_builds: row.get(13)?,
            max_disk_mib: ms(14)?,
            max_exchanges: row.get(15)?,
        },
        created_ms: ms(7)?.unwrap_or(0),
        used_ms: ms(8)?,
        revoked_ms: ms(9)?,
        expires_ms: ms(16)?,
        addresses: {
            let networks: Option<String> = row.get(17)?;
            networks
                .iter()
                .flat_map(|n| n.split_whitespace())
                .map(str::to_owned)
                .collect()
        },
        end_ms: ms(18)?,
    })
}

/// Migrates the schema from version `found` to [`SCHEMA_VERSION`]. Version 0 is an empty file.
fn migrate(tx: &Connection, found: i64) -> rusqlite::Result<()> {
    if found == 0 {
        tx.execute_batch(SCHEMA)?;
    }
    let done = usize::try_from(found.max(1) - 1).unwrap_or(0);
    for migration in MIGRATIONS.iter().skip(done) {
        tx.execute_batch(migration)?;
    }
    tx.pragma_update(None, "user_version", SCHEMA_VERSION)
}

#[cfg(test)]
mod tests;
