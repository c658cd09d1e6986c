//! Errors of opening a volume.

use jiffy_database::OpenError;
use std::io;
use std::path::PathBuf;

/// Errors of opening or creating a volume.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// SQLite failed.
    #[error("the catalog {} cannot be used: {source}; check that the disk is writable and not full", path.display())]
    Catalog {
        /// Path of the catalog.
        path: PathBuf,
        /// Cause.
        source: rusqlite::Error,
    },
    /// A file operation failed.
    #[error("cannot use {}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The database cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
}
