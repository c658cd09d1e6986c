//! Errors of opening a volume.

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
    /// A later version wrote the catalog.
    #[error("{} has version {found}: use the version of jiffy that wrote it", path.display())]
    Version {
        /// Path of the catalog.
        path: PathBuf,
        /// Version in the file.
        found: i64,
    },
}
