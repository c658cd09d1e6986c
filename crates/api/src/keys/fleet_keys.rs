//! Keys of a fleet: a table that each member (the daemon of one host) holds in memory, and that one
//! member writes. A check of a key therefore needs no request. A member that has lost contact with
//! the others rejects all keys, because one of them may have been revoked.

use super::check::verdict;
use super::database::KeySecrets;
use super::key_status::KeyEntry;
use super::local_key::{hash_in, write_secret};
use super::{
    Key, KeyError, KeyStatus, LimitChanges, Limits, NewKey, Revocation, Scope, Verdict, hash,
    new_secret, select,
};
use crate::fleet::TableChanges;
use jiffy_api_types::SnapshotAck;
use jiffy_engine_api::now_ms;
use jiffy_fleet::tables::{Action, Changed, TableError, Tables};
use jiffy_fleet_core::record::{
    KeyHash, KeyLimits, KeyRow, KeyScope, KeySnapshotAck, Row, RowKey, Table, UnknownFields,
};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Keys of a fleet.
#[derive(Debug)]
pub(super) struct FleetKeys {
    changes: TableChanges,
    /// File with the secret of a key of the host's owner.
    local: PathBuf,
    /// Time of the last use of each key on this host.
    uses: Mutex<HashMap<String, u64>>,
    /// Ids of the keys whose resources are to be removed, with the number of the commit of the
    /// tables from which they were read.
    ended: Mutex<(u64, Vec<String>)>,
}

impl FleetKeys {
    pub fn new(tables: Tables, home: &Path) -> Self {
        Self {
            changes: TableChanges::new(tables),
            local: home.join("api-key"),
            uses: Mutex::default(),
            ended: Mutex::default(),
        }
    }

    fn with<T>(&self, id: &str, read: impl FnOnce(&KeyRow) -> T) -> Option<T> {
        let row = self.tables().row(&RowKey::Key(id.to_owned()))?;
        row.as_key().map(read)
    }

    /// Returns the row with this current or previous secret, if the secret is valid.
    fn row_of_secret(&self, hash: &[u8; 32]) -> Option<Arc<Row>> {
        let row = self.tables().key_by_hash(&KeyHash(*hash))?;
        let key = row.as_key()?;
        let is_current = key.hash.0 == *hash;
        let is_valid = is_current || key.previous_until_ms.is_some_and(|until| until > now_ms());
        is_valid.then_some(row)
    }

    fn key_of(&self, row: &KeyRow) -> Key {
        let mut key = key_of(row);
        let used = self.uses.lock().get(&key.id).copied();
        key.used_ms = key.used_ms.max(used);
        key
    }

    pub fn key(&self, id: &str) -> Option<Key> {
        self.with(id, |row| self.key_of(row))
    }

    pub fn list(&self) -> Vec<Key> {
        let rows = self.tables().rows(Table::Keys);
        let keys = rows.iter().filter_map(|row| row.as_key());
        let mut keys: Vec<Key> = keys.map(|row| self.key_of(row)).collect();
        keys.sort_by(|a, b| (a.created_ms, &a.id).cmp(&(b.created_ms, &b.id)));
        keys
    }

    /// Returns the key `id` if its current secret has the hash `secret`.
    pub fn current(&self, id: &str, secret: &[u8]) -> Result<Option<Key>, KeyError> {
        // Another host may have revoked the key.
        self.tables().check_contact()?;
        let key = self.with(id, |row| (row.hash.0 == secret).then(|| self.key_of(row)));
        Ok(key.flatten())
    }

    pub fn check(&self, secret: &str, from: Option<IpAddr>) -> Result<Verdict, KeyError> {
        // Another host may have revoked the key.
        self.tables().check_contact()?;
        let row = self.row_of_secret(&hash(secret));
        let key = row.as_ref().and_then(|row| row.as_key());
        let verdict = key.map_or(Verdict::Unknown, |row| verdict(self.key_of(row), from));
        if let Verdict::Valid(key) = &verdict {
            self.uses.lock().insert(key.id.clone(), now_ms());
        }
        Ok(verdict)
    }

    pub fn status(&self, id: &str) -> KeyStatus {
        let status = self.with(id, |row| entry(row).status(now_ms()));
        status.unwrap_or(KeyStatus::Over)
    }

    pub fn is_in_force(&self, hash: &[u8; 32]) -> bool {
        let row = self.row_of_secret(hash);
        let key = row.as_ref().and_then(|row| row.as_key());
        key.is_some_and(|row| entry(row).status(now_ms()) == KeyStatus::InForce)
    }

    pub fn ended(&self) -> Vec<String> {
        let number = self.tables().number();
        let mut ended = self.ended.lock();
        if ended.0 != number {
            let is_ended = |row: &KeyRow| row.end_ms.is_some();
            *ended = (number, self.ids(is_ended).collect());
        }
        ended.1.clone()
    }

    pub fn admin_ids(&self) -> HashSet<String> {
        self.ids(|row| row.scope == KeyScope::Admin).collect()
    }

    pub fn any_is_unrevoked(&self) -> bool {
        self.ids(|row| row.revoked_ms.is_none()).next().is_some()
    }

    fn ids(&self, condition: impl Fn(&KeyRow) -> bool) -> impl Iterator<Item = String> {
        let rows = self.tables().rows(Table::Keys).into_iter();
        rows.filter_map(move |row| {
            let key = row.as_key().filter(|key| condition(key))?;
            Some(key.id.clone())
        })
    }

    pub fn insert(&self, key: &Key, secret: &str) -> Result<(), KeyError> {
        let row = row_of(KeySecrets {
            key: key.clone(),
            hash: hash(secret),
            previous_hash: None,
            previous_until_ms: None,
        });
        self.change(&key.id, Action::CreateKey(row)).map(drop)
    }

    pub fn revoke(&self, id: String, end: bool) -> Result<Revocation, KeyError> {
        let changed = self.change(&id.clone(), Action::RevokeKey { id, end })?;
        let unconfirmed = changed.unconfirmed.iter().map(ToString::to_string);
        Ok(Revocation {
            unconfirmed: unconfirmed.collect(),
            key: self.changed_key(&changed)?,
        })
    }

    /// Replaces the secret of a key. The previous secret remains valid for `overlap`. If the file
    /// of the host's owner has the previous secret, writes the new one to it.
    pub fn rotate(
        &self,
        which: &str,
        overlap: Duration,
        expires_ms: Option<u64>,
    ) -> Result<NewKey, KeyError> {
        if expires_ms.is_some_and(|at| at <= now_ms()) {
            return Err(KeyError::Expired);
        }
        let key = select(self.list(), which, |key| key.revoked_ms.is_none())?;
        let secret = new_secret()?;
        // Compare with the hash of the key before the change, which replaces the hash.
        let is_current = |local: [u8; 32]| self.with(&key.id, |row| row.hash.0 == local);
        let is_local = hash_in(&self.local)?.and_then(is_current).unwrap_or(false);
        let id = key.id.clone();
        let rotation = Action::RotateKey {
            id: key.id,
            hash: KeyHash(hash(&secret)),
            overlap_ms: u64::try_from(overlap.as_millis()).unwrap_or(u64::MAX),
            expires_ms,
        };
        let changed = self.change(&id, rotation)?;
        if is_local {
            write_secret(&self.local, &secret)?;
        }
        let key = self.changed_key(&changed)?;
        Ok(NewKey { key, secret })
    }

    pub fn change_limits(&self, which: &str, changes: &LimitChanges) -> Result<Key, KeyError> {
        let key = select(self.list(), which, |key| key.revoked_ms.is_none())?;
        let change = Action::LimitKey {
            former: stored_limits(key.limits),
            limits: stored_limits(changes.apply(key.limits)),
            id: key.id.clone(),
        };
        let changed = self.change(&key.id, change)?;
        self.changed_key(&changed)
    }

    fn changed_key(&self, changed: &Changed) -> Result<Key, KeyError> {
        let row = changed.row.as_key().ok_or(TableError::Unsettled)?;
        Ok(self.key_of(row))
    }

    /// Makes a change of the key with this id, and waits for its result.
    fn change(&self, id: &str, action: Action) -> Result<Changed, KeyError> {
        let changed = self.changes.change(action);
        changed.map_err(|e| match e {
            TableError::Unknown(_) => KeyError::Unknown(id.to_owned()),
            e => KeyError::Fleet(e),
        })
    }

    fn tables(&self) -> &Tables {
        &self.changes.tables
    }
}

fn entry(row: &KeyRow) -> KeyEntry {
    KeyEntry {
        revoked: row.revoked_ms.is_some(),
        end: row.end_ms.is_some(),
        expires_ms: row.expires_ms,
    }
}

/// Converts a row of the table to a key.
fn key_of(row: &KeyRow) -> Key {
    let limits = row.limits;
    Key {
        id: row.id.clone(),
        name: row.name.clone(),
        scope: match row.scope {
            KeyScope::Admin => Scope::Admin,
            KeyScope::Create => Scope::Create,
            KeyScope::Read => Scope::Read,
        },
        limits: Limits {
            max_sandboxes: limits.max_sandboxes,
            max_vcpus: limits.max_vcpus,
            max_memory_mib: limits.max_memory_mib,
            creates_per_minute: limits.creates_per_minute,
            max_paused: limits.max_paused,
            max_snapshots: limits.max_snapshots,
            max_templates: limits.max_templates,
            max_builds: limits.max_builds,
            max_disk_mib: limits.max_disk_mib,
            max_exchanges: limits.max_exchanges,
            idle_timeout_s: limits.idle_timeout_s,
            snapshot_ack: limits.snapshot_ack.map(|ack| match ack {
                KeySnapshotAck::Captured => SnapshotAck::Captured,
                KeySnapshotAck::Stored => SnapshotAck::Stored,
            }),
        },
        created_ms: row.created_ms,
        used_ms: row.used_ms,
        revoked_ms: row.revoked_ms,
        expires_ms: row.expires_ms,
        addresses: row.addresses.clone(),
        end_ms: row.end_ms,
    }
}

/// Converts limits to their form in the table.
fn stored_limits(limits: Limits) -> KeyLimits {
    KeyLimits {
        max_sandboxes: limits.max_sandboxes,
        max_vcpus: limits.max_vcpus,
        max_memory_mib: limits.max_memory_mib,
        creates_per_minute: limits.creates_per_minute,
        max_paused: limits.max_paused,
        max_snapshots: limits.max_snapshots,
        max_templates: limits.max_templates,
        max_builds: limits.max_builds,
        max_disk_mib: limits.max_disk_mib,
        max_exchanges: limits.max_exchanges,
        idle_timeout_s: limits.idle_timeout_s,
        snapshot_ack: limits.snapshot_ack.map(|ack| match ack {
            SnapshotAck::Captured => KeySnapshotAck::Captured,
            SnapshotAck::Stored => KeySnapshotAck::Stored,
        }),
    }
}

/// Returns the row of a key.
pub(super) fn row_of(secrets: KeySecrets) -> KeyRow {
    let key = secrets.key;
    KeyRow {
        id: key.id,
        hash: KeyHash(secrets.hash),
        name: key.name,
        scope: match key.scope {
            Scope::Admin => KeyScope::Admin,
            Scope::Create => KeyScope::Create,
            Scope::Read => KeyScope::Read,
        },
        limits: stored_limits(key.limits),
        created_ms: key.created_ms,
        used_ms: key.used_ms,
        revoked_ms: key.revoked_ms,
        expires_ms: key.expires_ms,
        end_ms: key.end_ms,
        addresses: key.addresses,
        previous_hash: secrets.previous_hash.map(KeyHash),
        previous_until_ms: secrets.previous_until_ms,
        unknown: UnknownFields::new(),
    }
}
