//! Revocation of keys, replacement of their secrets (rotation), and changes of their limits.

use super::super::local_key::{hash_in, write_secret};
use super::super::{Key, KeyError, LimitChanges, NewKey, hash, new_secret, select};
use super::{COLUMNS, Database, ack_text, key, stored};
use jiffy_engine_api::now_ms;
use rusqlite::{OptionalExtension, TransactionBehavior, params};
use std::path::Path;
use std::time::Duration;

impl Database {
    /// Revokes a key by its id, or by its name if exactly one unrevoked key has that name. The
    /// key's sandboxes remain.
    pub fn revoke(&self, which: &str) -> Result<Key, KeyError> {
        let key = self.only(which, |key| key.revoked_ms.is_none())?;
        self.mark_revoked(key, false)
    }

    /// Revokes a key and marks all its resources for removal. Also marks a key that is already
    /// revoked. The mark remains, so that the background task also removes resources that
    /// operations in flight create later.
    pub fn revoke_and_end(&self, which: &str) -> Result<Key, KeyError> {
        let key = self.only(which, |key| key.revoked_ms.is_none());
        let key = key.or_else(|_| self.only(which, |_| true))?;
        self.mark_revoked(key, true)
    }

    /// Writes a revocation to the database. With `end`, also marks the resources of the key for
    /// removal, even if the key was revoked before.
    fn mark_revoked(&self, key: Key, end: bool) -> Result<Key, KeyError> {
        let now = now_ms();
        let changed = self.connection().execute(
            // `coalesce` retains the time of an earlier revocation.
            "UPDATE keys SET revoked_ms = coalesce(revoked_ms, ?2),
                end_ms = CASE WHEN ?3 THEN coalesce(end_ms, ?2) ELSE end_ms END
                WHERE id = ?1 AND (revoked_ms IS NULL OR ?3)",
            params![key.id, stored(now), end],
        );
        let changed = changed.map_err(|e| self.failed(e))?;
        // The cache of this process must not grant access for another half second.
        self.invalidate_statuses();
        match changed {
            0 => Err(KeyError::Unknown(key.id)),
            _ => Ok(Key {
                revoked_ms: key.revoked_ms.or(Some(now)),
                end_ms: key.end_ms.or(end.then_some(now)),
                ..key
            }),
        }
    }

    /// Replaces the secret of a key that is not revoked. The previous secret remains valid for
    /// `overlap`, and earlier secrets become invalid. `expires_ms`, if present, replaces the key's
    /// expiry time.
    pub fn rotate(
        &self,
        which: &str,
        overlap: Duration,
        expires_ms: Option<u64>,
    ) -> Result<NewKey, KeyError> {
        let now = now_ms();
        if expires_ms.is_some_and(|at| at <= now) {
            return Err(KeyError::Expired);
        }
        let key = self.only(which, |key| key.revoked_ms.is_none())?;
        let secret = new_secret()?;
        let overlap = u64::try_from(overlap.as_millis()).unwrap_or(u64::MAX);
        let until = now.saturating_add(overlap);
        let local = self.path.with_file_name("api-key");
        // Compare with the hash of the key before the update, which replaces the hash.
        let is_local = self.is_secret_of(&key.id, &local)?;
        let changed = self.connection().execute(
            "UPDATE keys SET previous_hash = hash, previous_until_ms = ?2, hash = ?3,
                expires_ms = coalesce(?4, expires_ms) WHERE id = ?1 AND revoked_ms IS NULL",
            params![key.id, stored(until), hash(&secret), expires_ms.map(stored)],
        );
        let changed = changed.map_err(|e| self.failed(e))?;
        self.invalidate_statuses();
        // Another process revoked the key meanwhile.
        if changed == 0 {
            return Err(KeyError::Unknown(key.id));
        }
        // The file of the host's owner must have the new secret before the overlap ends.
        if is_local {
            write_secret(&local, &secret)?;
        }
        let key = Key {
            expires_ms: expires_ms.or(key.expires_ms),
            ..key
        };
        Ok(NewKey { key, secret })
    }

    /// Changes the limits of a key that is not revoked.
    pub fn change_limits(&self, which: &str, changes: &LimitChanges) -> Result<Key, KeyError> {
        let found = self.only(which, |key| key.revoked_ms.is_none())?;
        let mut connection = self.connection();
        // Another process must not change the limits between the read and the write.
        let mut change = || -> rusqlite::Result<Option<Key>> {
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let query = format!("SELECT {COLUMNS} FROM keys WHERE id = ?1 AND revoked_ms IS NULL");
            let Some(mut changed) = tx.query_row(&query, [&found.id], key).optional()? else {
                return Ok(None);
            };
            changed.limits = changes.apply(changed.limits);
            let limits = changed.limits;
            tx.execute(
                "UPDATE keys SET max_sandboxes = ?2, max_vcpus = ?3, max_memory_mib = ?4,
                    creates_per_minute = ?5, max_paused = ?6, max_snapshots = ?7,
                    max_templates = ?8, max_builds = ?9, max_disk_mib = ?10, max_exchanges = ?11,
                    idle_timeout_s = ?12, snapshot_ack = ?13 WHERE id = ?1",
                params![
                    changed.id,
                    limits.max_sandboxes,
                    limits.max_vcpus,
                    limits.max_memory_mib,
                    limits.creates_per_minute,
                    limits.max_paused,
                    limits.max_snapshots,
                    limits.max_templates,
                    limits.max_builds,
                    limits.max_disk_mib.map(stored),
                    limits.max_exchanges,
                    limits.idle_timeout_s.map(stored),
                    limits.snapshot_ack.map(ack_text),
                ],
            )?;
            tx.commit()?;
            Ok(Some(changed))
        };
        let changed = change().map_err(|e| self.failed(e))?;
        // Another process revoked the key meanwhile.
        changed.ok_or(KeyError::Unknown(found.id))
    }

    fn only(&self, which: &str, is_candidate: impl Fn(&Key) -> bool) -> Result<Key, KeyError> {
        // The list is short enough to be searched in memory.
        select(self.list()?, which, is_candidate)
    }

    /// Returns whether the file at `path` contains the secret of the key with this id.
    fn is_secret_of(&self, id: &str, path: &Path) -> Result<bool, KeyError> {
        let Some(hash) = hash_in(path)? else {
            return Ok(false);
        };
        let query = "SELECT EXISTS (SELECT 1 FROM keys WHERE id = ?1 AND hash = ?2)";
        let connection = self.connection();
        let found = connection.query_row(query, params![id, hash], |r| r.get(0));
        found.map_err(|e| self.failed(e))
    }
}
