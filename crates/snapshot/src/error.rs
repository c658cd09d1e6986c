//! Errors of reading, writing and removing snapshots.

use jiffy_proto::layer::IndexError;
use nix::libc::EIO;
use std::io;
use std::path::{Path, PathBuf};

/// Error of an operation on a snapshot.
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
    /// The snapshot does not exist.
    #[error("snapshot {0} does not exist")]
    Missing(String),
    /// The id is in use.
    #[error("snapshot {0} already exists")]
    Exists(String),
    /// The id is invalid.
    #[error("invalid snapshot id {0:?}: use 1 to 64 lower-case letters and digits")]
    Id(String),
    /// A file is damaged.
    #[error("{path} is damaged: {reason}; remove the snapshot, or restore it from a copy")]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Kind of damage.
        reason: String,
    },
    /// The format of the snapshot is not supported.
    #[error(
        "snapshot {id} has format {format}, but this version of jiffy reads format {supported}: use the \
         version of jiffy that took it, or build its template again"
    )]
    Format {
        /// Id of the snapshot.
        id: String,
        /// Format of the snapshot.
        format: u32,
        /// Supported format.
        supported: u32,
    },
    /// Part of the snapshot's memory is not stored on this host.
    #[error("the memory of snapshot {0} is not completely stored on this host: fetch it first")]
    Incomplete(String),
    /// The parent is missing.
    #[error("snapshot {child} needs its parent {parent}, which does not exist")]
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
        /// Inconsistency.
        problem: String,
    },
    /// A running sandbox uses the snapshot.
    #[error("snapshot {0} is in use by a running sandbox: stop the sandbox first")]
    InUse(String),
    /// Another snapshot is a child of the snapshot.
    #[error("snapshot {id} is the parent of {child}: remove {child} first")]
    HasChild {
        /// Id of the snapshot.
        id: String,
        /// Id of a child.
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

    /// Returns whether files of a snapshot are missing, unreadable or have unexpected content.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Missing(_) | Self::Damaged { .. } => true,
            Self::Io { source, .. } => {
                source.kind() == io::ErrorKind::NotFound || source.raw_os_error() == Some(EIO)
            }
            _ => false,
        }
    }
}
