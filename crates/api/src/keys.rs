//! API keys: authentication, scopes and limits.
//!
//! The keys of one host are in `<home>/keys.db` ([`database`]). The keys of a fleet are a table in
//! the memory of each host ([`fleet_keys`]). Only the SHA-256 of a secret is stored. Keys are
//! looked up by this hash, so the duration of a look-up reveals nothing about a key.

mod check;
mod database;
mod fleet_keys;
mod key_status;
mod limit_changes;
mod local_key;
mod stored;

pub use check::Verdict;
pub use key_status::KeyStatus;
pub use limit_changes::LimitChanges;
pub use local_key::local_key;
pub use stored::{Keys, Revocation, import_keys};

use check::networks;
use jiffy_api_types::SnapshotAck;
use jiffy_engine_api::{IdentityError, new_id, new_token, now_ms};
use jiffy_fleet::tables::TableError;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::io;
use std::path::PathBuf;

/// Prefix of every secret. Older client libraries of E2B accept no other form, and `jiffy_http`
/// recognises secrets in headers by their form.
pub(crate) const SECRET_PREFIX: &str = "e2b_";
/// Version of the schema of `keys.db`.
const SCHEMA_VERSION: i64 = 3;
/// Maximum length of a key's name in characters.
const MAX_NAME: usize = 100;
/// Maximum number of networks that a key may be used from.
const MAX_NETWORKS: usize = 64;

/// Errors of reading or changing keys.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// SQLite failed.
    #[error("the keys in {} cannot be used: {source}; check that the disk is writable and not full, and restore a damaged file from a backup", path.display())]
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
    /// No key matches the id or name, or several keys match the name.
    #[error(
        "key `{0}` does not exist, has expired or was revoked, or its name is ambiguous; use an id from `jiffy key ls`"
    )]
    Unknown(String),
    /// The keys of the fleet cannot be read or changed.
    #[error(transparent)]
    Fleet(#[from] TableError),
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
    /// Total disk space of paused sandboxes, snapshots, templates, uploads, build steps, functions
    /// and volumes, in MiB.
    pub max_disk_mib: Option<u64>,
    /// Concurrent requests and streams to sandboxes.
    pub max_exchanges: Option<u32>,
    /// Idle timeout in seconds of new sandboxes whose create and template set none. 0 means none.
    pub idle_timeout_s: Option<u64>,
    /// Time at which snapshots are acknowledged whose request does not state it. `None` for the
    /// default of the daemon.
    pub snapshot_ack: Option<SnapshotAck>,
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

/// Returns a new key with its secret.
fn new_key(
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
    let secret = new_secret()?;
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
    Ok(NewKey { key, secret })
}

fn new_secret() -> Result<String, IdentityError> {
    Ok(format!("{SECRET_PREFIX}{}", new_token()?))
}

/// Returns the only key that satisfies `is_candidate` and has the id `which`, or otherwise the
/// name `which`.
fn select(
    mut keys: Vec<Key>,
    which: &str,
    is_candidate: impl Fn(&Key) -> bool,
) -> Result<Key, KeyError> {
    keys.retain(|k| is_candidate(k) && (k.id == which || k.name == which));
    match keys.iter().position(|k| k.id == which) {
        Some(exact) => Ok(keys.swap_remove(exact)),
        None if keys.len() == 1 => Ok(keys.swap_remove(0)),
        None => Err(KeyError::Unknown(which.escape_debug().to_string())),
    }
}

pub(crate) fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret).into()
}

#[cfg(test)]
pub(crate) mod tests;
