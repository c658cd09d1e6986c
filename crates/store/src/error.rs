//! Errors of the store.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Defect of the bytes of an object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Not what it should be.
    #[error("it is something else")]
    Magic,
    /// An unknown version.
    #[error("it has version {found}, and this jiffy reads version {read}: use a newer jiffy")]
    Version {
        /// Version of the object.
        found: u32,
        /// Version of this program.
        read: u32,
    },
    /// Contradictions, lengths beyond the limits or bytes that are not authentic.
    #[error("{0}")]
    Damaged(&'static str),
}

/// Failure of an operation on a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The address of a store is invalid.
    #[error("{url:?} is no address of a store: {reason}; write s3://BUCKET/PREFIX or file:///PATH")]
    Url {
        /// The address.
        url: String,
        /// Defect.
        reason: String,
    },
    /// The store cannot be reached, or keeps failing.
    #[error(
        "the store failed at {object} after {attempts} attempts: {reason}; try again when it answers"
    )]
    Unavailable {
        /// Key of the object.
        object: String,
        /// Number of requests made.
        attempts: u32,
        /// Last failure.
        reason: String,
    },
    /// The directory or bucket of the store is not there: nothing is known of its objects.
    #[error("the store is not there, asked for {object}: {reason}")]
    Absent {
        /// Key of the object.
        object: String,
        /// Place that was looked at, and remedy.
        reason: String,
    },
    /// The store brought nothing for too long.
    #[error("the store did not answer for {object} within {limit:?}; try again when it does")]
    Timeout {
        /// Key of the object.
        object: String,
        /// Time without a byte.
        limit: Duration,
    },
    /// The credentials do not allow the request.
    #[error(
        "the store refuses access to {object}: {reason}; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, the policy of the bucket and this host's clock"
    )]
    Denied {
        /// Key of the object.
        object: String,
        /// Answer of the store.
        reason: String,
    },
    /// An object is missing.
    #[error("the store has no {object}")]
    Missing {
        /// Key of the object.
        object: String,
    },
    /// An object exists already, or is not the one that was read.
    #[error("{object} was changed by another host meanwhile; repeat the operation")]
    Conflict {
        /// Key of the object.
        object: String,
    },
    /// An object is not as it was written.
    #[error("{object} is damaged: {reason}; repair it from a copy of the snapshot")]
    Damaged {
        /// Key of the object.
        object: String,
        /// Defect.
        reason: FormatError,
    },
    /// An object has another size than it may have.
    #[error("{object} has {bytes} bytes, and may have {limit}")]
    TooLarge {
        /// Key of the object.
        object: String,
        /// Its size in bytes.
        bytes: u64,
        /// The bound in bytes.
        limit: u64,
    },
    /// The store ignores the conditions of writes.
    #[error(
        "cannot write {object} on a condition: the store has no ETags, or ignores If-None-Match; use a server with conditional writes (versitygw: without --nometa, on a file system with extended attributes)"
    )]
    NoConditions {
        /// Key of the object.
        object: String,
    },
    /// The store has an older version of a record than this host has seen.
    #[error(
        "the store has version {version} of {object}, and this host has seen version {known}: it was set back, or serves old data; if you restored it from a backup, remove {} and try again",
        file.display()
    )]
    Regressed {
        /// Record.
        object: String,
        /// Version in the store; 0 if it has none.
        version: u64,
        /// Highest version that this host has seen.
        known: u64,
        /// File in which the host remembers versions.
        file: PathBuf,
    },
    /// A listing has more objects than it may have.
    #[error(
        "the listing of {prefix} has more than {limit} objects; remove snapshots, or check that the store is the right one"
    )]
    TooMany {
        /// Common beginning of the keys.
        prefix: String,
        /// Maximum number of objects.
        limit: usize,
    },
    /// A manifest of another tenant.
    #[error("{object} belongs to another tenant")]
    Tenant {
        /// Key of the object.
        object: String,
    },
    /// A key is missing, malformed or does not fit.
    #[error("the key of tenant {tenant:?} cannot be used: {reason}")]
    Key {
        /// Name of the tenant.
        tenant: String,
        /// Defect.
        reason: String,
    },
    /// The source of a push is unusable.
    #[error("the snapshot cannot be pushed: {0}")]
    Source(String),
    /// A push took longer than its lease.
    #[error("the lease {0} ended before the push did; push again")]
    LeaseEnded(String),
    /// Packs went away during a push.
    #[error("{0} is gone since this push began; push again")]
    Gone(String),
    /// Another collection is under way.
    #[error("another collection runs, or was cut off less than {0:?} ago; try again later")]
    Collecting(Duration),
    /// The cache is full of what is in use.
    #[error(
        "the cache {path} may have {limit} bytes and all of it is in use; stop sandboxes or raise its bound"
    )]
    CacheFull {
        /// Directory of the cache.
        path: PathBuf,
        /// Bound in bytes.
        limit: u64,
    },
    /// The file system of a local file is full.
    #[error("the file system of {path} is full; free space on it, or lower --cache-size")]
    DiskFull {
        /// Path of the file.
        path: PathBuf,
    },
    /// A local file may not be written.
    #[error("{path} cannot be written: {source}; the host needs a home that it can write")]
    ReadOnly {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A local file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

impl StoreError {
    /// True if the store cannot be reached, or keeps failing.
    pub fn is_unavailable(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { .. } | Self::Absent { .. } | Self::Timeout { .. }
        )
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| {
            let path = path.to_owned();
            match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    Self::DiskFull { path }
                }
                io::ErrorKind::ReadOnlyFilesystem => Self::ReadOnly { path, source },
                _ => Self::Io { path, source },
            }
        }
    }

    pub(crate) fn damaged(object: &str) -> impl FnOnce(FormatError) -> Self + '_ {
        move |reason| Self::Damaged {
            object: object.to_owned(),
            reason,
        }
    }
}
