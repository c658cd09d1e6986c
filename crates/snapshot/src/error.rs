//! The one error of reading, writing and removing snapshots.

use jiffy_proto::layer::IndexError;
use std::io;
use std::path::{Path, PathBuf};

/// What went wrong with which snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No such snapshot.
    #[error("there is no snapshot {0}")]
    Missing(String),
    /// The name is taken.
    #[error("snapshot {0} exists already")]
    Exists(String),
    /// Not an id.
    #[error("{0:?} is no snapshot id: it has 1 to 64 lower-case letters and digits")]
    Id(String),
    /// A manifest that is none.
    #[error("{path} is damaged: {reason}; remove the snapshot, or restore it from a copy")]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Another format.
    #[error(
        "snapshot {id} has format {found} and this jiffy reads format {known}: use the version of jiffy that made it, or \
         build its template anew"
    )]
    Format {
        /// Which snapshot.
        id: String,
        /// Its format.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// A lineage that ends nowhere.
    #[error("snapshot {child} needs its parent {parent}, which is gone")]
    Orphan {
        /// The child.
        child: String,
        /// What is missing.
        parent: String,
    },
    /// A lineage that never ends, or is too long to run from.
    #[error("the lineage of snapshot {id} {problem}")]
    Lineage {
        /// Whose.
        id: String,
        /// What is wrong.
        problem: String,
    },
    /// Something runs from it.
    #[error("snapshot {0} is in use by a running sandbox: stop that first")]
    InUse(String),
    /// Something descends from it.
    #[error("snapshot {id} is the parent of {child}: remove that first")]
    HasChild {
        /// Whose.
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
