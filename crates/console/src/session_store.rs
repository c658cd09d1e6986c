//! [`SessionStore`]: sessions of signed-in users, in `<home>/console.db`, so that they survive a
//! restart of the daemon.

use crate::codes::random_hex;
use jiffy_engine_api::{IdentityError, now_ms};
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Time without use after which a session ends.
pub(crate) const IDLE_MS: u64 = 12 * 3600 * 1000;
/// Minimum time between two recordings of a session's use.
const USE_PRECISION_MS: u64 = 60_000;
/// Maximum number of sessions.
const MAX_SESSIONS: u64 = 10_000;
/// Maximum length of the description of a browser in bytes.
const MAX_BROWSER: usize = 200;

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS sessions (
        hash BLOB PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        key_id TEXT,
        key_hash BLOB,
        created_ms INTEGER NOT NULL,
        used_ms INTEGER NOT NULL,
        address TEXT NOT NULL,
        browser TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS sessions_by_use ON sessions (used_ms);
";
const COLUMNS: &str = "id, key_id, key_hash, created_ms, used_ms, address, browser";

/// Error of the database of sessions.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// SQLite failed.
    #[error("the sessions of the console cannot be read or stored: {0}")]
    Database(#[from] rusqlite::Error),
    /// The file cannot be created.
    #[error("cannot create the file with the sessions of the console: {0}")]
    File(#[from] std::io::Error),
    /// Random bytes are not available.
    #[error("cannot generate a session: {0}")]
    Entropy(#[from] IdentityError),
}

/// A session.
#[derive(Debug, Clone)]
pub(crate) struct Session {
    /// Public id.
    pub id: String,
    /// Id of the key, and hash of its secret at the sign-in: the session ends if the secret is
    /// replaced. `None` for a session of the host's owner.
    pub key: Option<(String, Vec<u8>)>,
    pub created_ms: u64,
    pub used_ms: u64,
    /// Address of the client that signed in.
    pub address: String,
    /// `User-Agent` of the client that signed in.
    pub browser: String,
}

/// Session as shown to users.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ShownSession {
    pub id: String,
    #[serde(rename = "keyID")]
    pub key_id: Option<String>,
    pub created_ms: u64,
    pub used_ms: u64,
    pub address: String,
    pub browser: String,
    /// True for the session of the request.
    pub is_current: bool,
}

/// Sessions of the console. Only hashes of their secrets are stored.
pub struct SessionStore(Mutex<Connection>);

impl SessionStore {
    /// Opens the sessions of the data directory `home`.
    ///
    /// # Errors
    /// [`StoreError`] if the file cannot be created or read.
    pub fn open(home: &Path) -> Result<Self, StoreError> {
        let path = home.join("console.db");
        let mut options = OpenOptions::new();
        options.create(true).append(true).mode(0o600).open(&path)?;
        let connection = Connection::open(&path)?;
        // Writes are synced: a session that has ended must not be valid again after a power
        // failure.
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "synchronous", "full")?;
        connection.execute_batch(SCHEMA)?;
        Ok(Self(Mutex::new(connection)))
    }

    /// Creates a session and returns its secret of 256 random bits. Removes expired sessions, and
    /// the least recently used ones if there are too many.
    pub(crate) fn create(
        &self,
        key: Option<(&str, &[u8])>,
        address: &str,
        browser: &str,
    ) -> Result<(Session, String), StoreError> {
        let secret = random_hex::<32>()?;
        let now = now_ms();
        let session = Session {
            id: random_hex::<8>()?,
            key: key.map(|(id, hash)| (id.to_owned(), hash.to_vec())),
            created_ms: now,
            used_ms: now,
            address: address.to_owned(),
            browser: browser[..browser.floor_char_boundary(MAX_BROWSER)].to_owned(),
        };
        let connection = self.0.lock();
        let expired = stored(now.saturating_sub(IDLE_MS));
        connection.execute("DELETE FROM sessions WHERE used_ms < ?1", [expired])?;
        // Retains one session fewer than the maximum. SQLite requires a LIMIT before an OFFSET, and
        // -1 means no limit.
        connection.execute(
            "DELETE FROM sessions WHERE hash IN (SELECT hash FROM sessions ORDER BY used_ms DESC
                LIMIT -1 OFFSET ?1)",
            [stored(MAX_SESSIONS - 1)],
        )?;
        connection.execute(
            "INSERT INTO sessions (hash, id, key_id, key_hash, created_ms, used_ms, address,
                browser) VALUES (?1, ?2, ?3, ?4, ?5, ?5, ?6, ?7)",
            params![
                hash(&secret),
                session.id,
                key.map(|(id, _)| id),
                key.map(|(_, hash)| hash),
                stored(now),
                session.address,
                session.browser,
            ],
        )?;
        Ok((session, secret))
    }

    /// Returns the session with this secret and records its use. `None` if it does not exist or has
    /// expired.
    pub(crate) fn find(&self, secret: &str) -> Result<Option<Session>, StoreError> {
        let connection = self.0.lock();
        let query = format!("SELECT {COLUMNS} FROM sessions WHERE hash = ?1");
        let mut statement = connection.prepare_cached(&query)?;
        let found = statement.query_row([hash(secret)], session).optional()?;
        let now = now_ms();
        let found = found.filter(|session| now.saturating_sub(session.used_ms) < IDLE_MS);
        if let Some(session) = &found
            && now.saturating_sub(session.used_ms) >= USE_PRECISION_MS
        {
            connection.execute(
                "UPDATE sessions SET used_ms = ?2 WHERE id = ?1",
                params![session.id, stored(now)],
            )?;
        }
        Ok(found)
    }

    /// Returns whether a session exists, without recording a use.
    pub(crate) fn exists(&self, id: &str) -> Result<bool, StoreError> {
        let connection = self.0.lock();
        let mut statement =
            connection.prepare_cached("SELECT used_ms FROM sessions WHERE id = ?1")?;
        let used: Option<i64> = statement.query_row([id], |row| row.get(0)).optional()?;
        let used = used.and_then(|ms| u64::try_from(ms).ok());
        Ok(used.is_some_and(|used| now_ms().saturating_sub(used) < IDLE_MS))
    }

    /// Returns all sessions, the most recently used first. With `key`, only sessions of that key.
    pub(crate) fn list(&self, key: Option<&str>) -> Result<Vec<Session>, StoreError> {
        let connection = self.0.lock();
        let query = format!(
            "SELECT {COLUMNS} FROM sessions WHERE used_ms >= ?1 AND (?2 IS NULL OR key_id = ?2)
                ORDER BY used_ms DESC"
        );
        let mut statement = connection.prepare_cached(&query)?;
        let since = stored(now_ms().saturating_sub(IDLE_MS));
        let sessions = statement.query_map(params![since, key], session)?;
        Ok(sessions.collect::<rusqlite::Result<_>>()?)
    }

    /// Ends a session. Returns whether it existed.
    pub(crate) fn remove(&self, id: &str) -> Result<bool, StoreError> {
        let connection = self.0.lock();
        Ok(connection.execute("DELETE FROM sessions WHERE id = ?1", [id])? > 0)
    }
}

fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret).into()
}

/// Converts to SQLite's signed integers.
fn stored(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

/// Reads a session from a row.
fn session(row: &Row<'_>) -> rusqlite::Result<Session> {
    let ms = |i: usize| -> rusqlite::Result<u64> {
        let ms: i64 = row.get(i)?;
        Ok(u64::try_from(ms).unwrap_or(0))
    };
    let key: Option<String> = row.get(1)?;
    let key_hash: Option<Vec<u8>> = row.get(2)?;
    Ok(Session {
        id: row.get(0)?,
        // A damaged row must not become a session of the owner: an empty hash matches no key.
        key: key.map(|key| (key, key_hash.unwrap_or_default())),
        created_ms: ms(3)?,
        used_ms: ms(4)?,
        address: row.get(5)?,
        browser: row.get(6)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, SessionStore) {
        let dir = tempfile::tempdir().unwrap();
        let store = SessionStore::open(dir.path()).unwrap();
        (dir, store)
    }

    #[test]
    fn sessions_survive_a_restart_and_their_secrets_are_not_stored() {
        let (dir, store) = store();
        let key = ("key-1", [7; 32].as_slice());
        let (session, secret) = store.create(Some(key), "127.0.0.1", "browser").unwrap();
        assert_eq!(secret.len(), 64);
        drop(store);
        let store = SessionStore::open(dir.path()).unwrap();
        let found = store.find(&secret).unwrap().unwrap();
        assert_eq!((found.id, found.key), (session.id.clone(), session.key));
        assert!(store.find(&session.id).unwrap().is_none());
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            let text = String::from_utf8_lossy(&bytes);
            assert!(!text.contains(&secret));
        }
        assert!(store.remove(&session.id).unwrap());
        assert!(store.find(&secret).unwrap().is_none());
    }

    #[test]
    fn a_session_ends_after_twelve_hours_without_use_and_their_number_is_bounded() {
        let (_dir, store) = store();
        let (old, secret) = store.create(None, "::1", "").unwrap();
        let age = |ms: u64| {
            let sql = "UPDATE sessions SET used_ms = used_ms - ?1";
            store.0.lock().execute(sql, [stored(ms)]).unwrap();
        };
        age(IDLE_MS - 1000);
        // The use is recorded, so the time starts again.
        assert!(store.find(&secret).unwrap().is_some());
        age(IDLE_MS - 1000);
        assert!(store.exists(&old.id).unwrap());
        age(1001);
        assert!(!store.exists(&old.id).unwrap());
        assert!(store.find(&secret).unwrap().is_none());
        assert!(store.list(None).unwrap().is_empty());
        let fill = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
            INSERT INTO sessions
            SELECT randomblob(32), hex(randomblob(8)), NULL, NULL, ?2, ?2, '', '' FROM n";
        let now = stored(now_ms() - 1000);
        let count = stored(MAX_SESSIONS + 5);
        store.0.lock().execute(fill, [count, now]).unwrap();
        store.create(None, "::1", "").unwrap();
        assert_eq!(store.list(None).unwrap().len() as u64, MAX_SESSIONS);
    }
}
