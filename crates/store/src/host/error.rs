//! [`RemoteError`]: errors of snapshots in the shared store, as this host reports them.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys. A *pack* is an object with chunks of snapshots.

use crate::StoreError;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Failure of an operation on the shared store.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The operation on the store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The file of master keys is missing.
    #[error(
        "the key file {} does not exist: copy it from a host that uses this store, or omit \
         --store-keys to create one",
        path.display()
    )]
    NoKeys {
        /// Path of the file.
        path: PathBuf,
    },
    /// The tenant of a requested layer does not exist in the store.
    #[error("tenant {tenant} does not exist in the store")]
    NoTenant {
        /// Name of the tenant.
        tenant: String,
    },
    /// A VMM requested a layer that is not in its grant. A *grant* is the file that lists the
    /// layers that one VMM may read.
    #[error("this layer is not one of the guest's layers")]
    NotGranted,
    /// A snapshot in the store is inconsistent.
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

/// Interval after which an unavailable store is tried again.
const STORE_RETRY: Duration = Duration::from_secs(5);
/// Interval after which an operation is retried whose error needs an action of the operator: a full
/// or read-only disk, a full cache, wrong credentials.
const OPERATOR_RETRY: Duration = Duration::from_secs(30);

impl RemoteError {
    /// Returns whether a snapshot or pack that a push is based on was removed from the store.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Store(StoreError::Gone(_)))
    }

    /// Returns the time after which a retry may succeed. `None` if waiting alone does not help.
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
            ) => Some(OPERATOR_RETRY),
            _ => None,
        }
    }

    /// Returns whether a snapshot in the store is damaged.
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
