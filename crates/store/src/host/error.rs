//! Errors of snapshots in the shared store.

use crate::StoreError;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Failure of an operation on the shared store.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The store failed or refused.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The file of master keys is missing.
    #[error(
        "there is no file of keys {}: copy it from a host that uses this store, or leave \
         --store-keys out and have one made",
        path.display()
    )]
    NoKeys {
        /// Path of the file.
        path: PathBuf,
    },
    /// The store does not know a tenant that it knew before.
    #[error("the store does not know tenant {tenant}")]
    NoTenant {
        /// Name of the tenant.
        tenant: String,
    },
    /// A VMM asked for a layer that is not its own.
    #[error("this layer is not one of the guest's")]
    NotGranted,
    /// A snapshot in the store contradicts itself.
    #[error("snapshot {id} in the store {reason}; push it again from a host that has it")]
    Damaged {
        /// Id of the snapshot.
        id: String,
        /// Contradiction.
        reason: &'static str,
    },
    /// A local file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

/// Time after which a store that did not answer is asked again.
const STORE_RETRY: Duration = Duration::from_secs(5);
/// Time after which something that takes mending is tried again: a full or read-only disk, a full
/// cache, credentials.
const MENDING_RETRY: Duration = Duration::from_secs(30);

impl RemoteError {
    /// True if something that a push is based on was removed from the store.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Store(StoreError::Gone(_)))
    }

    /// Time after which the same may succeed, if waiting is all it takes.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Store(e) if e.is_unavailable() => Some(STORE_RETRY),
            Self::Store(
                StoreError::CacheFull { .. }
                | StoreError::DiskFull { .. }
                | StoreError::ReadOnly { .. }
                | StoreError::Denied { .. }
                | StoreError::NoConditions { .. }
                | StoreError::Regressed { .. }
                | StoreError::TooMany { .. },
            ) => Some(MENDING_RETRY),
            _ => None,
        }
    }

    /// True if a snapshot in the store is not as it was written.
    pub fn is_damage(&self) -> bool {
        use StoreError::{Damaged, Missing, Tenant, TooLarge};
        match self {
            Self::Damaged { .. } => true,
            Self::Store(e) => matches!(
                e,
                Damaged { .. } | Missing { .. } | Tenant { .. } | TooLarge { .. }
            ),
            _ => false,
        }
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Io {
            path: path.to_owned(),
            source,
        }
    }
}
