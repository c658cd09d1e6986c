//! Error of reading, writing and removing snapshots.

use jiffy_proto::layer::IndexError;
use std::io;
use std::path::{Path, PathBuf};

/// Failure of an operation on a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// No such snapshot.
    #[error("there is no snapshot {0}")]
    Missing(String),
    /// The id is in use.
    #[error("snapshot {0} exists already")]
    Exists(String),
    /// The id is invalid.
    #[error("{0:?} is no snapshot id: it has 1 to 64 lower-case letters and digits")]
    Id(String),
    /// A file is damaged.
    #[error("{path} is damaged: {reason}; remove the snapshot, or restore it from a copy")]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Damage.
        reason: String,
    },
    /// The snapshot has another format.
    #[error(
        "snapshot {id} has format {found} and this jiffy reads format {loaded}: use the version of \
         jiffy that made it, or build its template anew"
    )]
    Format {
        /// Id of the snapshot.
        id: String,
        /// Format of the snapshot.
        found: u32,
        /// Format of this program.
        loaded: u32,
    },
    /// Chunks of its memory have not arrived on this host.
    #[error("the memory of snapshot {0} has not all arrived on this host: have it fetched first")]
    Incomplete(String),
    /// The parent is missing.
    #[error("snapshot {child} needs its parent {parent}, which is gone")]
    Orphan {
        /// Id of the child.
        child: String,
        /// Id of the missing parent.
        parent: String,
    },
    /// The lineage is cyclic, too long or inconsistent.
    #[error("the lineage of snapshot {id} {problem}")]
    Lineage {
        /// Id of the snapshot.
        id: String,
        /// Damage.
        problem: String,
    },
    /// A running sandbox uses it.
    #[error("snapshot {0} is in use by a running sandbox: stop that first")]
    InUse(String),
    /// Another snapshot is its child.
    #[error("snapshot {id} is the parent of {child}: remove that first")]
    HasChild {
        /// Id of the snapshot.
        id: String,
        /// One of its children.
        child: String,
    },
}

impl SnapshotError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn damaged(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Damaged {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn index(path: &Path) -> impl FnOnce(IndexError) -> Self + '_ {
        move |e| Self::damaged(path, e)
    }
}
