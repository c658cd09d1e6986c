//! One interface to the keys of a single host (a database) and of a fleet (a table in memory). The
//! *coordinator* of a fleet is the host that makes all changes of the table.

use super::check::verdict;
use super::database::Database;
use super::fleet_keys::{FleetKeys, row_of};
use super::{
    Key, KeyError, KeyStatus, LimitChanges, Limits, NewKey, Scope, Validity, Verdict, new_key,
    select,
};
use jiffy_fleet::tables::Tables;
use jiffy_fleet_core::record::{RowContent, RowKey};
use std::collections::HashSet;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

/// Interval at which [`Keys::until_invalid`] reads the status of a key.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// API keys of one host, or of a fleet.
#[derive(Debug)]
pub struct Keys(Stored);

/// Place in which the keys are stored.
#[derive(Debug)]
enum Stored {
    /// Keys of one host.
    Database(Box<Database>),
    /// Keys of a fleet.
    Fleet(FleetKeys),
}

/// Revoked key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revocation {
    /// Key.
    pub key: Key,
    /// Hosts of the fleet that have not confirmed the revocation within a second.
    pub unconfirmed: Vec<String>,
}

impl Keys {
    /// Opens or creates `<home>/keys.db`.
    pub fn open(home: &Path) -> Result<Self, KeyError> {
        Database::open(home).map(|keys| Self(Stored::Database(Box::new(keys))))
    }

    /// Uses the keys of a fleet. `home` is the data directory of this host. Must be called in a
    /// runtime with several threads. Methods that change keys wait for other hosts: they must not
    /// be called in a runtime with one thread.
    pub fn of_fleet(tables: Tables, home: &Path) -> Self {
        Self(Stored::Fleet(FleetKeys::new(tables, home)))
    }

    /// Returns whether the keys belong to a fleet.
    pub fn is_fleet(&self) -> bool {
        matches!(self.0, Stored::Fleet(_))
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
        let new = new_key(name, scope, limits, validity)?;
        match &self.0 {
            Stored::Database(keys) => keys.insert(&new.key, &new.secret)?,
            Stored::Fleet(keys) => keys.insert(&new.key, &new.secret)?,
        }
        Ok(new)
    }

    /// Returns all keys, oldest first, including revoked keys.
    pub fn list(&self) -> Result<Vec<Key>, KeyError> {
        match &self.0 {
            Stored::Database(keys) => keys.list(),
            Stored::Fleet(keys) => Ok(keys.list()),
        }
    }

    /// Returns all keys as rows for the table of a fleet that this host joins. Empty if the keys
    /// already belong to a fleet.
    pub fn fleet_rows(&self) -> Result<Vec<RowContent>, KeyError> {
        match &self.0 {
            Stored::Database(keys) => {
                let keys = keys.secrets()?.into_iter();
                Ok(keys.map(|key| RowContent::Key(row_of(key))).collect())
            }
            Stored::Fleet(_) => Ok(Vec::new()),
        }
    }

    /// Returns the key with this id, unless it was revoked. Expired keys are included.
    pub(crate) fn in_force(&self, id: &str) -> Result<Option<Key>, KeyError> {
        match &self.0 {
            Stored::Database(keys) => keys.in_force(id),
            Stored::Fleet(keys) => Ok(keys.key(id).filter(|key| key.revoked_ms.is_none())),
        }
    }

    /// Returns the scope of the key with this id, including revoked keys.
    pub(crate) fn scope_of(&self, id: &str) -> Result<Option<Scope>, KeyError> {
        match &self.0 {
            Stored::Database(keys) => keys.scope_of(id),
            Stored::Fleet(keys) => Ok(keys.key(id).map(|key| key.scope)),
        }
    }

    /// Returns the key `id` if it is in force for a client at `from` and its current secret has the
    /// hash `secret`. Unlike [`Keys::check`], this accepts no secret that a rotation replaced.
    pub(crate) fn current(
        &self,
        id: &str,
        secret: &[u8],
        from: Option<IpAddr>,
    ) -> Result<Option<Key>, KeyError> {
        let key = match &self.0 {
            Stored::Database(keys) => keys.current(id, secret),
            Stored::Fleet(keys) => keys.current(id, secret),
        };
        Ok(key?.and_then(|key| verdict(key, from).valid()))
    }

    /// Verifies the secret of a client at `from`. `None` if the client's address is unknown.
    ///
    /// # Errors
    /// [`KeyError::Fleet`] if this host had no contact with its fleet for 60 s.
    pub fn check(&self, secret: &str, from: Option<IpAddr>) -> Result<Verdict, KeyError> {
        match &self.0 {
            Stored::Database(keys) => keys.check(secret, from),
            Stored::Fleet(keys) => keys.check(secret, from),
        }
    }

    /// Returns the status of the key with this id; `None` means the host's owner.
    pub fn status(&self, id: Option<&str>) -> KeyStatus {
        match (&self.0, id) {
            (_, None) => KeyStatus::InForce,
            (Stored::Database(keys), Some(id)) => keys.status(id),
            (Stored::Fleet(keys), Some(id)) => keys.status(id),
        }
    }

    /// Returns whether the key with this hash is in force. The result is at most half a second old.
    pub(crate) fn is_in_force(&self, hash: &[u8; 32]) -> bool {
        match &self.0 {
            Stored::Database(keys) => keys.is_in_force(hash),
            Stored::Fleet(keys) => keys.is_in_force(hash),
        }
    }

    /// Returns the ids of the keys whose resources are to be removed.
    pub(crate) fn ended(&self) -> Vec<String> {
        match &self.0 {
            Stored::Database(keys) => keys.ended(),
            Stored::Fleet(keys) => keys.ended(),
        }
    }

    /// Waits until the key with this id is no longer in force. The delay is at most two seconds.
    pub async fn until_invalid(&self, id: Option<&str>) {
        if id.is_none() {
            // The host's owner is always valid.
            std::future::pending::<()>().await;
        }
        while self.status(id) == KeyStatus::InForce {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the ids of the keys that act for the host's owner, including revoked keys.
    pub fn admin_ids(&self) -> Result<HashSet<String>, KeyError> {
        match &self.0 {
            Stored::Database(keys) => keys.admin_ids(),
            Stored::Fleet(keys) => Ok(keys.admin_ids()),
        }
    }

    /// Returns whether a key exists that was not revoked.
    pub fn any_is_unrevoked(&self) -> Result<bool, KeyError> {
        match &self.0 {
            Stored::Database(keys) => keys.any_is_unrevoked(),
            Stored::Fleet(keys) => Ok(keys.any_is_unrevoked()),
        }
    }

    /// Revokes a key by its id, or by its name if exactly one unrevoked key has that name. The
    /// key's sandboxes remain.
    pub fn revoke(&self, which: &str) -> Result<Revocation, KeyError> {
        match &self.0 {
            Stored::Database(keys) => keys.revoke(which).map(Revocation::from),
            Stored::Fleet(keys) => {
                let key = select(keys.list(), which, |key| key.revoked_ms.is_none())?;
                keys.revoke(key.id, false)
            }
        }
    }

    /// Revokes a key and marks all its resources for removal. Also marks a key that is already
    /// revoked. The mark remains, so that the background task also removes resources that
    /// operations in flight create later.
    pub fn revoke_and_end(&self, which: &str) -> Result<Revocation, KeyError> {
        match &self.0 {
            Stored::Database(keys) => keys.revoke_and_end(which).map(Revocation::from),
            Stored::Fleet(keys) => {
                let key = select(keys.list(), which, |key| key.revoked_ms.is_none());
                let key = key.or_else(|_| select(keys.list(), which, |_| true))?;
                keys.revoke(key.id, true)
            }
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
        match &self.0 {
            Stored::Database(keys) => keys.rotate(which, overlap, expires_ms),
            Stored::Fleet(keys) => keys.rotate(which, overlap, expires_ms),
        }
    }

    /// Changes the limits of a key that is not revoked. The next request that uses the key is
    /// subject to them.
    ///
    /// # Errors
    /// [`TableError::Changed`] if the limits of a key of a fleet are changed at the same time.
    pub fn change_limits(&self, which: &str, changes: &LimitChanges) -> Result<Key, KeyError> {
        match &self.0 {
            Stored::Database(keys) => keys.change_limits(which, changes),
            Stored::Fleet(keys) => keys.change_limits(which, changes),
        }
    }

    /// Returns the database, for tests.
    #[cfg(test)]
    pub(super) fn connection(&self) -> parking_lot::MutexGuard<'_, rusqlite::Connection> {
        match &self.0 {
            Stored::Database(keys) => keys.connection(),
            Stored::Fleet(_) => panic!("keys of a fleet have no database"),
        }
    }
}

/// Imports the keys in `<home>/keys.db` into the tables of a fleet. Keys that are in the tables
/// already are not changed, so that an import can be repeated. Returns the number of new keys.
///
/// # Errors
/// [`KeyError::Fleet`] if no coordinator is reachable, or another key has the same id or secret.
pub async fn import_keys(home: &Path, tables: &Tables) -> Result<usize, KeyError> {
    let mut rows = Keys::open(home)?.fleet_rows()?;
    rows.retain(|row| {
        let RowContent::Key(key) = row else {
            return true;
        };
        let existing = tables.row(&RowKey::Key(key.id.clone()));
        let existing = existing.as_ref().and_then(|row| row.as_key());
        // Another creation time means a different key with the same id, with which the import
        // fails.
        existing.is_none_or(|existing| existing.created_ms != key.created_ms)
    });
    if rows.is_empty() {
        return Ok(0);
    }
    let imported = tables.import(rows).await;
    Ok(imported?.rows)
}

impl From<Key> for Revocation {
    fn from(key: Key) -> Self {
        Self {
            key,
            unconfirmed: Vec::new(),
        }
    }
}
