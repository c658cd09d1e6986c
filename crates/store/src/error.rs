//! Errors of the store.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys. A *push* copies a snapshot to the store. A *collection* removes
//! objects that no snapshot needs. A *lease* protects the objects of a push in progress from
//! collections.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Defect of the bytes of an object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Wrong magic number.
    #[error("it has another format")]
    Magic,
    /// Unknown version.
    #[error("it has version {found}, but this jiffy reads version {read}: use a newer jiffy")]
    Version {
        /// Version of the object.
        found: u32,
        /// Version that this program reads.
        read: u32,
    },
    /// Contradictory, oversized or unauthentic content.
    #[error("{0}")]
    Damaged(&'static str),
}

/// Failure of an operation on a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The URL of a store is invalid.
    #[error("{url:?} is not a store URL: {reason}; use s3://BUCKET/PREFIX or file:///PATH")]
    Url {
        /// The URL.
        url: String,
        /// Defect.
        reason: String,
    },
    /// The store is unreachable or keeps failing.
    #[error(
        "cannot access {object} after {attempts} attempts: {reason}; try again when the store is available"
    )]
    Unavailable {
        /// Key of the object.
        object: String,
        /// Number of attempts.
        attempts: u32,
        /// Last failure.
        reason: String,
    },
    /// The directory or bucket of the store does not exist. The state of its objects is unknown.
    #[error("cannot access {object}: the store does not exist: {reason}")]
    Absent {
        /// Key of the object.
        object: String,
        /// Path that was checked, and remedy.
        reason: String,
    },
    /// The store sent no data for too long.
    #[error(
        "the store sent no data for {object} within {limit:?}; try again when the store is available"
    )]
    Timeout {
        /// Key of the object.
        object: String,
        /// Timeout.
        limit: Duration,
    },
    /// A conditional write may have been executed: the store did not confirm or reject it.
    #[error(
        "cannot determine whether {object} was written: {reason}; try again when the store is available"
    )]
    OutcomeUnknown {
        /// Key of the object.
        object: String,
        /// Last failure.
        reason: String,
    },
    /// The store denies the request.
    #[error(
        "the store denied access to {object}: {reason}; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, the policy of the bucket and this host's clock"
    )]
    Denied {
        /// Key of the object.
        object: String,
        /// Response of the store.
        reason: String,
    },
    /// An object is missing.
    #[error("the store has no {object}")]
    Missing {
        /// Key of the object.
        object: String,
    },
    /// An object already exists, or was replaced since it was read.
    #[error("{object} was concurrently changed by another host; repeat the operation")]
    Conflict {
        /// Key of the object.
        object: String,
    },
    /// An object has invalid or unauthentic content.
    #[error("{object} is damaged: {reason}; repair it from a copy of the snapshot")]
    Damaged {
        /// Key of the object.
        object: String,
        /// Defect.
        reason: FormatError,
    },
    /// An object exceeds its maximum size.
    #[error("{object} has {bytes} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Key of the object.
        object: String,
        /// Size of the object in bytes.
        bytes: u64,
        /// Maximum size in bytes.
        limit: u64,
    },
    /// The store does not implement conditional writes.
    #[error(
        "cannot write {object} conditionally: the store has no ETags or ignores If-None-Match; use a server with conditional writes (versitygw: without --nometa, on a file system with extended attributes)"
    )]
    NoConditions {
        /// Key of the object.
        object: String,
    },
    /// The store has an older version of a record than this host has seen.
    #[error(
        "the store has version {version} of {object}, but this host has seen version {known}: the store was rolled back or is stale; after restoring a backup, remove {}",
        file.display()
    )]
    Regressed {
        /// Record.
        object: String,
        /// Version in the store. 0 if the record does not exist.
        version: u64,
        /// Highest version that this host has seen.
        known: u64,
        /// File in which the host remembers versions.
        file: PathBuf,
    },
    /// A listing exceeds its maximum number of objects.
    #[error(
        "the listing of {prefix} has more than {limit} objects; remove snapshots, or check that the store is the right one"
    )]
    TooMany {
        /// Common prefix of the keys.
        prefix: String,
        /// Maximum number of objects.
        limit: usize,
    },
    /// The manifest belongs to another tenant.
    #[error("{object} belongs to another tenant")]
    Tenant {
        /// Key of the object.
        object: String,
    },
    /// A key is missing, malformed or wrong.
    #[error("cannot use {}: {reason}", named_key(tenant))]
    Key {
        /// Name of the tenant.
        tenant: String,
        /// Defect.
        reason: String,
    },
    /// A task of the operation ended without a result.
    #[error("a task of the operation failed: {0}; try again")]
    Task(String),
    /// The source of a push is unusable.
    #[error("cannot push the snapshot: {0}")]
    Source(String),
    /// A push took longer than its lease.
    #[error("the lease {0} expired before the push completed; push again")]
    LeaseEnded(String),
    /// Objects that a push relies on were removed during the push.
    #[error("{0} was removed during this push; push again")]
    Gone(String),
    /// Another collection is in progress.
    #[error(
        "another collection is running, or was interrupted less than {0:?} ago; try again later"
    )]
    Collecting(Duration),
    /// All layers in the full cache are in use.
    #[error(
        "the cache {path} is full: all of its {limit} bytes are in use; stop sandboxes or increase --cache-size"
    )]
    CacheFull {
        /// Directory of the cache.
        path: PathBuf,
        /// Maximum size in bytes.
        limit: u64,
    },
    /// The file system of a local file is full.
    #[error("the file system of {path} is full; free space on it, or reduce --cache-size")]
    DiskFull {
        /// Path of the file.
        path: PathBuf,
    },
    /// A local file may not be written.
    #[error("cannot write {path}: {source}; the data directory must be writable")]
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

/// Names the key of a tenant for an error. The key file of the host belongs to no tenant.
fn named_key(tenant: &str) -> String {
    match tenant {
        "" => "the master keys".to_owned(),
        tenant => format!("the key of tenant {tenant:?}"),
    }
}

impl StoreError {
    /// Returns whether the store is unreachable or keeps failing.
    pub fn is_unavailable(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { .. }
                | Self::Absent { .. }
                | Self::Timeout { .. }
                | Self::OutcomeUnknown { .. }
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
