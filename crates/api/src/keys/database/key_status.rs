//! Cached statuses of the keys in the database. The gateway checks the key of a sandbox at every
//! request to the sandbox, and must not read the database each time.

use super::super::key_status::KeyEntry;
use super::super::{KeyError, KeyStatus};
use super::Database;
use jiffy_engine_api::now_ms;
use rusqlite::{OptionalExtension, Row, params};
use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::time::{Duration, Instant};

/// Maximum age of a cached status. A change by another process takes effect after this delay.
const MAX_CACHE_AGE: Duration = Duration::from_millis(500);
/// Number of cached statuses above which expired ones are removed.
const MAX_CACHED: usize = 4096;

/// Cached statuses, each with the time at which it was read. Unknown keys are not cached, because
/// another process may create them at any time.
#[derive(Debug, Default)]
pub(super) struct KeyStatuses {
    /// Cached entries by id of the key, with the times of their reading.
    by_id: HashMap<String, (Instant, KeyEntry)>,
    /// Cached entries by hash of the secret.
    by_hash: HashMap<[u8; 32], (Instant, KeyEntry)>,
    /// Ids of the keys whose resources are to be removed.
    ended: Option<(Instant, Vec<String>)>,
}

/// Returns whether a status that was read at `read` may still be used.
fn is_fresh(read: &Instant) -> bool {
    read.elapsed() < MAX_CACHE_AGE
}

/// Caches a status that was just read.
fn cache_entry<K: Eq + Hash>(cache: &mut HashMap<K, (Instant, KeyEntry)>, key: K, entry: KeyEntry) {
    // Remove outdated statuses now and then, so that the cache does not grow with every key.
    if cache.len() >= MAX_CACHED {
        cache.retain(|_, (read, _)| is_fresh(read));
    }
    cache.insert(key, (Instant::now(), entry));
}

impl Database {
    /// Returns the status of the key with this id, [`KeyStatus::Over`] if the key is unknown. The
    /// status is at most half a second old, unless the database cannot be read. Reads at most one
    /// row.
    pub fn status(&self, id: &str) -> KeyStatus {
        let cached = self.statuses.lock().by_id.get(id).copied();
        let entry = match cached {
            Some((read, entry)) if is_fresh(&read) => Some(entry),
            _ => match self.read_entry(id) {
                Ok(found) => {
                    let by_id = &mut self.statuses.lock().by_id;
                    match found {
                        // The lock was not held while reading. A concurrent reader may have stored
                        // a status, which is equally fresh and is replaced.
                        Some(entry) => cache_entry(by_id, id.to_owned(), entry),
                        None => drop(by_id.remove(id)),
                    }
                    found
                }
                // If the database cannot be read, an outdated status is better than disconnecting
                // the owner.
                Err(e) => {
                    tracing::error!(key = id, error = %e, "cannot read an API key, using its last status");
                    cached.map(|(_, entry)| entry)
                }
            },
        };
        entry.map_or(KeyStatus::Over, |entry| entry.status(now_ms()))
    }

    /// Returns whether the key with this hash is in force. The result is at most half a second old.
    pub(crate) fn is_in_force(&self, hash: &[u8; 32]) -> bool {
        let cached = self.statuses.lock().by_hash.get(hash).copied();
        let entry = match cached {
            Some((read, entry)) if is_fresh(&read) => Some(entry),
            _ => match self.read_entry_of_hash(hash) {
                Ok(Some(entry)) => {
                    cache_entry(&mut self.statuses.lock().by_hash, *hash, entry);
                    Some(entry)
                }
                // Unknown keys are not cached.
                Ok(None) => None,
                // Unlike in [`Self::status`], no outdated status is used: the key counts as not in
                // force.
                Err(e) => {
                    tracing::error!(error = %e, "cannot read the API key of a request, rejecting it");
                    None
                }
            },
        };
        entry.is_some_and(|entry| entry.status(now_ms()) == KeyStatus::InForce)
    }

    /// Returns the ids of the keys whose resources are to be removed. Reads only their rows.
    pub(crate) fn ended(&self) -> Vec<String> {
        let cached = self.statuses.lock().ended.clone();
        match cached {
            Some((read, ids)) if is_fresh(&read) => ids,
            _ => match self.read_ended() {
                Ok(ids) => {
                    self.statuses.lock().ended = Some((Instant::now(), ids.clone()));
                    ids
                }
                Err(e) => {
                    tracing::error!(error = %e, "cannot read the expired and revoked API keys");
                    cached.map(|(_, ids)| ids).unwrap_or_default()
                }
            },
        }
    }

    /// Returns the ids of the keys that act for the host's owner, including revoked keys. Reads
    /// only their rows.
    pub fn admin_ids(&self) -> Result<HashSet<String>, KeyError> {
        let connection = self.connection();
        let read = || -> rusqlite::Result<HashSet<String>> {
            let query = "SELECT id FROM keys WHERE scope = 'admin'";
            let mut statement = connection.prepare_cached(query)?;
            statement.query_map([], |row| row.get(0))?.collect()
        };
        read().map_err(|e| self.failed(e))
    }

    /// Returns whether a key exists that was not revoked.
    pub fn any_is_unrevoked(&self) -> Result<bool, KeyError> {
        let query = "SELECT EXISTS (SELECT 1 FROM keys WHERE revoked_ms IS NULL)";
        let exists = self.connection().query_row(query, [], |row| row.get(0));
        exists.map_err(|e| self.failed(e))
    }

    /// Invalidates the cache.
    pub(super) fn invalidate_statuses(&self) {
        // Clear all statuses: changes of keys are rare.
        *self.statuses.lock() = KeyStatuses::default();
    }

    fn read_entry(&self, id: &str) -> Result<Option<KeyEntry>, KeyError> {
        // The connection for status checks, which does not wait for a writer.
        let reader = self.reader.lock();
        let read = || {
            let query = "SELECT revoked_ms, end_ms, expires_ms FROM keys WHERE id = ?1";
            let mut statement = reader.prepare_cached(query)?;
            statement.query_row([id], entry).optional()
        };
        read().map_err(|e| self.failed(e))
    }

    fn read_entry_of_hash(&self, hash: &[u8; 32]) -> Result<Option<KeyEntry>, KeyError> {
        let now = super::stored(now_ms());
        let reader = self.reader.lock();
        let read = || {
            // After a rotation, the previous secret may remain valid for some time.
            let query = "SELECT revoked_ms, end_ms, expires_ms FROM keys
                WHERE hash = ?1 OR (previous_hash = ?1 AND previous_until_ms > ?2)";
            let mut statement = reader.prepare_cached(query)?;
            let found = statement.query_row(params![hash, now], entry);
            found.optional()
        };
        read().map_err(|e| self.failed(e))
    }

    fn read_ended(&self) -> Result<Vec<String>, KeyError> {
        let reader = self.reader.lock();
        let read = || -> rusqlite::Result<Vec<String>> {
            let query = "SELECT id FROM keys WHERE end_ms IS NOT NULL";
            let mut statement = reader.prepare_cached(query)?;
            statement.query_map([], |row| row.get(0))?.collect()
        };
        read().map_err(|e| self.failed(e))
    }
}

/// Reads a row that begins with `revoked_ms, end_ms, expires_ms`.
fn entry(row: &Row<'_>) -> rusqlite::Result<KeyEntry> {
    Ok(KeyEntry {
        revoked: moment(row, 0)?.is_some(),
        end: moment(row, 1)?.is_some(),
        expires_ms: moment(row, 2)?,
    })
}

/// Reads a time in milliseconds. `None` for NULL and for negative values.
fn moment(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<u64>> {
    let ms: Option<i64> = row.get(column)?;
    Ok(ms.and_then(|ms| u64::try_from(ms).ok()))
}
