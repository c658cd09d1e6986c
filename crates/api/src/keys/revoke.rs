//! Revocation of keys, and replacement of their secrets (rotation).

use super::{Key, KeyError, Keys, NewKey, SECRET_PREFIX, hash, stored};
use jiffy_engine_api::{new_token, now_ms};
use rusqlite::params;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

impl Keys {
    /// Revokes a key by its id, or by its name if exactly one key in force has that name. The key's
    /// sandboxes remain.
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
        let secret = format!("{SECRET_PREFIX}{}", new_token()?);
        let overlap = u64::try_from(overlap.as_millis()).unwrap_or(u64::MAX);
        let until = now.saturating_add(overlap);
        let local = self.path.with_file_name("api-key");
        // Checked before the update, which replaces the hash.
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

    /// Returns the only key that satisfies `is_candidate` and has the id `which`, or otherwise the
    /// name `which`.
    fn only(&self, which: &str, is_candidate: impl Fn(&Key) -> bool) -> Result<Key, KeyError> {
        // The list is short enough to be searched in memory.
        let mut matches: Vec<Key> = self.list()?;
        matches.retain(|k| is_candidate(k) && (k.id == which || k.name == which));
        match matches.iter().position(|k| k.id == which) {
            Some(exact) => Ok(matches.swap_remove(exact)),
            None if matches.len() == 1 => Ok(matches.swap_remove(0)),
            None => Err(KeyError::Unknown(which.escape_debug().to_string())),
        }
    }

    /// Returns whether the file at `path` contains the secret of the key with this id.
    fn is_secret_of(&self, id: &str, path: &Path) -> Result<bool, KeyError> {
        let secret = match fs::read_to_string(path) {
            Ok(secret) => secret,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(source) => {
                let path = path.to_owned();
                return Err(KeyError::File { path, source });
            }
        };
        let query = "SELECT EXISTS (SELECT 1 FROM keys WHERE id = ?1 AND hash = ?2)";
        let connection = self.connection();
        let found = connection.query_row(query, params![id, hash(secret.trim())], |r| r.get(0));
        found.map_err(|e| self.failed(e))
    }
}

/// Writes the secret of the host's owner atomically.
pub(super) fn write_secret(path: &Path, secret: &str) -> Result<(), KeyError> {
    let failed = |source| KeyError::File {
        path: path.to_owned(),
        source,
    };
    // The file is complete on storage before it replaces the old file.
    let new = path.with_file_name(".new-api-key");
    let mut options = OpenOptions::new();
    options.create(true).truncate(true).write(true).mode(0o600);
    let mut file = options.open(&new).map_err(failed)?;
    writeln!(file, "{secret}").map_err(failed)?;
    file.sync_all().map_err(failed)?;
    fs::rename(&new, path).map_err(failed)
}
