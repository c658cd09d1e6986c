//! Keys of one host: `<home>/keys.db`.
//!
//! The daemon and `jiffy key` open the file concurrently. Every request looks up its key there, so
//! a revocation takes effect with the next request.

mod key_status;
mod revoke;

use super::check::verdict;
use super::{Key, KeyError, Limits, SCHEMA_VERSION, Scope, Verdict, hash};
use jiffy_api_types::SnapshotAck;
use jiffy_engine_api::now_ms;
use key_status::KeyStatuses;
use parking_lot::{Mutex, MutexGuard};
use rusqlite::{Connection, OptionalExtension, Row, params};
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Minimum time between two recordings of a key's use, which is therefore the precision of
/// `used_ms`.
const USE_PRECISION: Duration = Duration::from_secs(60);
/// Maximum wait for a transaction of another process.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Schema of version 1. [`MIGRATIONS`] upgrades it to later versions, also in a new file.
pub(super) const SCHEMA: &str = "
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
/// Columns that were added later, with their types. Earlier versions ignore them, so the schema
/// version is the same.
const LATER_COLUMNS: [(&str, &str); 2] = [("idle_timeout_s", "INTEGER"), ("snapshot_ack", "TEXT")];
/// Indexes that were added later and do not change the schema version.
const INDEXES: &str = "
    CREATE INDEX IF NOT EXISTS keys_by_end ON keys (end_ms) WHERE end_ms IS NOT NULL;
    CREATE INDEX IF NOT EXISTS keys_of_hosts ON keys (id) WHERE scope = 'admin';
";
/// Columns that [`key`] reads by position. [`Database::secrets`] appends further columns
/// and reads them by name.
const COLUMNS: &str = "id, name, scope, max_sandboxes, max_vcpus, max_memory_mib, \
    creates_per_minute, created_ms, used_ms, revoked_ms, max_paused, max_snapshots, \
    max_templates, max_builds, max_disk_mib, max_exchanges, expires_ms, addresses, end_ms, \
    idle_timeout_s, snapshot_ack";

/// Key with the hashes of its secrets.
pub(super) struct KeySecrets {
    pub key: Key,
    pub hash: [u8; 32],
    /// Hash of the secret that the last rotation replaced.
    pub previous_hash: Option<[u8; 32]>,
    /// Time until which the replaced secret remains valid, in milliseconds since 1970.
    pub previous_until_ms: Option<u64>,
}

/// Keys in `<home>/keys.db`.
#[derive(Debug)]
pub(super) struct Database {
    path: PathBuf,
    connection: Mutex<Connection>,
    /// Separate connection for status checks, which must not wait for a writer.
    reader: Mutex<Connection>,
    /// Time at which a use was last recorded, by key id.
    recorded_uses: Mutex<HashMap<String, Instant>>,
    /// Cached statuses of keys.
    statuses: Mutex<KeyStatuses>,
}

impl Database {
    /// Opens or creates `<home>/keys.db`.
    pub fn open(home: &Path) -> Result<Self, KeyError> {
        let path = home.join("keys.db");
        // Create the file with mode 0600 before SQLite opens it, so that no other user can ever
        // read it.
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
        for (column, kind) in LATER_COLUMNS {
            add_column(&tx, column, kind).map_err(failed)?;
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

    pub(super) fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock()
    }

    fn failed(&self, source: rusqlite::Error) -> KeyError {
        KeyError::Database {
            path: self.path.clone(),
            source,
        }
    }

    /// Stores a new key.
    pub fn insert(&self, key: &Key, secret: &str) -> Result<(), KeyError> {
        let limits = key.limits;
        self.connection()
            .execute(
                "INSERT INTO keys (id, hash, name, scope, max_sandboxes, max_vcpus, max_memory_mib,
                    creates_per_minute, created_ms, max_paused, max_snapshots, max_templates,
                    max_builds, max_disk_mib, max_exchanges, expires_ms, addresses, idle_timeout_s,
                    snapshot_ack)
                    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16,
                        ?17, ?18, ?19)",
                params![
                    key.id,
                    hash(secret),
                    key.name,
                    key.scope.name(),
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
                    limits.idle_timeout_s.map(stored),
                    limits.snapshot_ack.map(ack_text),
                ],
            )
            .map_err(|e| self.failed(e))?;
        self.invalidate_statuses();
        Ok(())
    }

    /// Returns the key `id` if its current secret has the hash `secret`.
    pub fn current(&self, id: &str, secret: &[u8]) -> Result<Option<Key>, KeyError> {
        let reader = self.reader.lock();
        let read = || -> rusqlite::Result<Option<Key>> {
            let query = format!("SELECT {COLUMNS} FROM keys WHERE id = ?1 AND hash = ?2");
            let mut statement = reader.prepare_cached(&query)?;
            statement.query_row(params![id, secret], key).optional()
        };
        read().map_err(|e| self.failed(e))
    }

    /// Verifies the secret of a client at `from`. Records the use of a valid key.
    pub fn check(&self, secret: &str, from: Option<IpAddr>) -> Result<Verdict, KeyError> {
        let now = now_ms();
        let found = {
            let connection = self.connection();
            let read = || -> rusqlite::Result<Option<Key>> {
                // After a rotation, the previous secret remains valid for a while.
                let query = format!(
                    "SELECT {COLUMNS} FROM keys WHERE hash = ?1
                        OR (previous_hash = ?1 AND previous_until_ms > ?2)"
                );
                let mut statement = connection.prepare_cached(&query)?;
                let found = statement.query_row(params![hash(secret), stored(now)], key);
                found.optional()
            };
            read().map_err(|e| self.failed(e))?
        };
        let verdict = found.map_or(Verdict::Unknown, |key| verdict(key, from));
        if let Verdict::Valid(key) = &verdict
            && self.should_record_use(&key.id)
        {
            // Only log the error: the key is valid nevertheless.
            let recorded = self.connection().execute(
                "UPDATE keys SET used_ms = ?2 WHERE id = ?1",
                params![key.id, stored(now)],
            );
            if let Err(e) = recorded {
                tracing::warn!(key = %key.id, error = %e, "cannot record the use of a key");
            }
        }
        Ok(verdict)
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

    /// Returns all keys with the hashes of their secrets.
    pub fn secrets(&self) -> Result<Vec<KeySecrets>, KeyError> {
        let connection = self.connection();
        let read = || -> rusqlite::Result<Vec<KeySecrets>> {
            let query = format!(
                "SELECT {COLUMNS}, hash, previous_hash, previous_until_ms FROM keys ORDER BY rowid"
            );
            let mut statement = connection.prepare_cached(&query)?;
            let keys = statement.query_map([], |row| {
                let until: Option<i64> = row.get("previous_until_ms")?;
                Ok(KeySecrets {
                    key: key(row)?,
                    hash: row.get("hash")?,
                    previous_hash: row.get("previous_hash")?,
                    previous_until_ms: until.and_then(|ms| u64::try_from(ms).ok()),
                })
            })?;
            keys.collect()
        };
        read().map_err(|e| self.failed(e))
    }

    /// Returns the key with this id, unless it was revoked. Expired keys are included.
    pub fn in_force(&self, id: &str) -> Result<Option<Key>, KeyError> {
        let connection = self.connection();
        let read = || -> rusqlite::Result<Option<Key>> {
            let query = format!("SELECT {COLUMNS} FROM keys WHERE id = ?1 AND revoked_ms IS NULL");
            let mut statement = connection.prepare_cached(&query)?;
            statement.query_row([id], key).optional()
        };
        read().map_err(|e| self.failed(e))
    }

    /// Returns the scope of the key with this id, including revoked keys.
    pub fn scope_of(&self, id: &str) -> Result<Option<Scope>, KeyError> {
        let connection = self.connection();
        let read = || -> rusqlite::Result<Option<String>> {
            let mut statement =
                connection.prepare_cached("SELECT scope FROM keys WHERE id = ?1")?;
            statement.query_row([id], |row| row.get(0)).optional()
        };
        let scope = read().map_err(|e| self.failed(e))?;
        Ok(scope.as_deref().and_then(Scope::from_name))
    }

    /// Limits writes of the time of the last use to one per [`USE_PRECISION`] and key.
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

/// Converts to SQLite's signed integers.
fn stored(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

/// Reads a key from a row with the [`COLUMNS`].
fn key(row: &Row<'_>) -> rusqlite::Result<Key> {
    let number = |i: usize| -> rusqlite::Result<Option<u64>> {
        let number: Option<i64> = row.get(i)?;
        Ok(number.and_then(|number| u64::try_from(number).ok()))
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
            max_disk_mib: number(14)?,
            max_exchanges: row.get(15)?,
            idle_timeout_s: number(19)?,
            snapshot_ack: row.get::<_, Option<String>>(20)?.as_deref().and_then(ack),
        },
        created_ms: number(7)?.unwrap_or(0),
        used_ms: number(8)?,
        revoked_ms: number(9)?,
        expires_ms: number(16)?,
        addresses: {
            let networks: Option<String> = row.get(17)?;
            networks
                .iter()
                .flat_map(|n| n.split_whitespace())
                .map(str::to_owned)
                .collect()
        },
        end_ms: number(18)?,
    })
}

fn ack_text(ack: SnapshotAck) -> &'static str {
    match ack {
        SnapshotAck::Captured => "captured",
        SnapshotAck::Stored => "stored",
    }
}

/// Reads a stored default. An unknown text, written by a newer version, is no default.
fn ack(text: &str) -> Option<SnapshotAck> {
    match text {
        "captured" => Some(SnapshotAck::Captured),
        "stored" => Some(SnapshotAck::Stored),
        _ => None,
    }
}

/// Adds a column to the table of keys, if it is missing. Both texts are constants of this program.
fn add_column(tx: &Connection, column: &str, kind: &str) -> rusqlite::Result<()> {
    let query = "SELECT 1 FROM pragma_table_info('keys') WHERE name = ?1";
    let has_column = tx
        .query_row(query, [column], |_| Ok(()))
        .optional()?
        .is_some();
    if has_column {
        return Ok(());
    }
    tx.execute_batch(&format!("ALTER TABLE keys ADD COLUMN {column} {kind}"))
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
