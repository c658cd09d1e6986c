//! Errors of snapshots in the shared store.

use jiffy_store::StoreError;
use std::io;
use std::path::{Path, PathBuf};

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
    /// A local file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

impl RemoteError {
    /// True if something that a push is based on was removed from the store.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Store(StoreError::Gone(_)))
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Io {
            path: path.to_owned(),
            source,
        }
    }
}
