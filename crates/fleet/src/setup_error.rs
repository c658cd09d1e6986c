//! Errors of `jiffy fleet init` and `jiffy fleet join`.
//!
//! A *fleet* is a group of hosts that share a store and their sandboxes.

use crate::RecordError;
use jiffy_fleet_core::IdError;
use jiffy_fleet_core::record::RecordError as FormatError;
use jiffy_store::StoreError;
#[cfg(feature = "client")]
use std::path::Path;
use std::path::PathBuf;

/// Error of `jiffy fleet init`, `join` or `token`.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file of the data directory cannot be read or written.
    #[error("cannot use {}: {source}", path.display())]
    File {
        /// File.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// A file of the data directory has invalid content.
    #[error("{} is invalid: {reason}", path.display())]
    Content {
        /// File.
        path: PathBuf,
        /// Violated rule.
        reason: String,
    },
    /// The host is a member already.
    #[error(
        "this data directory is already {member} of fleet {fleet}; a host joins once: use another \
         data directory for another host (JIFFY_HOME)"
    )]
    Member {
        /// Member.
        member: String,
        /// Fleet.
        fleet: String,
    },
    /// The host is not a member.
    #[error("this host is not a member of a fleet: run `jiffy fleet init` or `jiffy fleet join`")]
    NoMember,
    /// The store cannot be used by a fleet.
    #[error("the store {url} cannot be used by a fleet: {reason}")]
    Store {
        /// URL.
        url: String,
        /// Reason.
        reason: String,
    },
    /// The records belong to another fleet.
    #[error("{place} is used by {fleet}: {reason}")]
    Occupied {
        /// Store or etcd.
        place: String,
        /// Fleet.
        fleet: String,
        /// Instructions.
        reason: String,
    },
    /// A record is missing.
    #[error("the fleet has no record {0}: check the store and the records of fleet.toml")]
    NoRecord(String),
    /// A token is malformed.
    #[error("the token cannot be used: {0}")]
    Token(String),
    /// The request was rejected.
    #[error("{0}")]
    Rejected(String),
    /// The store failed.
    #[error(transparent)]
    Storage(#[from] StoreError),
    /// The store failed.
    #[error(transparent)]
    Remote(#[from] jiffy_store::host::RemoteError),
    /// The records failed.
    #[error(transparent)]
    Records(#[from] RecordError),
    /// A record has invalid content.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// An id is malformed.
    #[error(transparent)]
    Id(#[from] IdError),
    /// A certificate cannot be used.
    #[cfg(feature = "client")]
    #[error(transparent)]
    Certificate(#[from] crate::certificates::CertificateError),
    /// The join failed.
    #[cfg(feature = "client")]
    #[error(transparent)]
    Join(#[from] crate::channel::JoinError),
}

#[cfg(feature = "client")]
impl SetupError {
    /// Returns whether the same call may succeed later without any change.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Records(error) => error.is_temporary(),
            Self::Remote(error) => error.retry_after().is_some(),
            Self::Storage(error) => error.is_unavailable(),
            _ => false,
        }
    }

    /// Returns a function that adds the path to an I/O error.
    pub(crate) fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        |source| Self::File {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn content(path: &Path, reason: impl ToString) -> Self {
        Self::Content {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }
}
