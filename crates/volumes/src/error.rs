//! Errors of volumes and of their files.

use crate::stored::MAX_SNAPSHOTS;
use crate::volume::{
    MAX_BYTES, MAX_FILES, MAX_KEY_BYTES, MAX_KEY_FILES, MAX_NAME, MAX_VOLUMES, MIN_BYTES,
};
use jiffy_database::OpenError;
use jiffy_engine_api::IdentityError;
use jiffy_secrets::SecretError;
use jiffy_store::host::RemoteError;
use jiffy_volume_server::image::ImageError;
use nix::errno::Errno;
use std::io;
use std::path::PathBuf;

/// Errors of creating, finding or removing volumes.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// SQLite failed.
    #[error("the volumes in {} cannot be used: {source}; check that the disk is writable and not full, and restore a damaged file from a backup", path.display())]
    Database {
        /// Path of the database.
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
    /// The key of the host failed.
    #[error(transparent)]
    Key(#[from] SecretError),
    /// The token cannot be decrypted.
    #[error(
        "the token of volume `{0}` cannot be decrypted: the file `secrets-key` of the data directory \
         was replaced, or the record is damaged"
    )]
    Sealed(String),
    /// Random bytes are not available.
    #[error(transparent)]
    Entropy(#[from] IdentityError),
    /// The name is invalid.
    #[error(
        "`{0}` is not a name for a volume: use 1 to {MAX_NAME} letters, digits, `-` and `_`, not \
         starting with `vol-`"
    )]
    Name(String),
    /// The size is invalid.
    #[error(
        "the size of the volume is invalid: use {} to {} MiB and 1 to {MAX_FILES} files",
        MIN_BYTES >> 20, MAX_BYTES >> 20
    )]
    Size,
    /// The owner has a volume with this name.
    #[error("a volume named `{0}` exists: choose another name")]
    Exists(String),
    /// The owner has the maximum number of volumes.
    #[error("the key has {MAX_VOLUMES} volumes, which is the maximum: remove one first")]
    Full,
    /// The sizes of the owner's volumes would exceed the maximum.
    #[error(
        "the volumes of the key would have more than {} MiB or {MAX_KEY_FILES} files in total: \
         choose a smaller size, or remove a volume",
        MAX_KEY_BYTES >> 20
    )]
    Total,
    /// Sandboxes have mounted the volume.
    #[error(
        "volume `{name}` is mounted in sandboxes ({count}: {sandboxes}): kill the sandboxes first"
    )]
    Mounted {
        /// Name of the volume.
        name: String,
        /// Number of sandboxes.
        count: usize,
        /// Ids of some of them.
        sandboxes: String,
    },
    /// The owner has the maximum number of snapshots.
    #[error(
        "the key has {MAX_SNAPSHOTS} snapshots of volumes, which is the maximum: remove one first"
    )]
    FullOfSnapshots,
    /// The owner has no such snapshot.
    #[error(
        "snapshot `{0}` of a volume does not exist; `jiffy volume snapshots` and `GET /volumesnapshots` list them"
    )]
    UnknownSnapshot(String),
    /// The size of a new volume is less than the files of its snapshot need.
    #[error("the files of the snapshot need {} MiB: choose a larger size", .0.div_ceil(1 << 20))]
    Small(u64),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] RemoteError),
    /// The image in the store is damaged, or cannot be unpacked.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The owner has no such volume.
    #[error(
        "volume `{0}` does not exist; `jiffy volume ls` and `GET /volumes` list the volumes of this key"
    )]
    Unknown(String),
}

/// Errors of access to the files of a volume.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The path is invalid.
    #[error(
        "`{0}` is not a path in a volume: use at most 4096 bytes, names of at most 255 bytes, and no \
         `..`"
    )]
    Path(String),
    /// The operation is not possible on the root.
    #[error("the root of the volume cannot be removed or replaced: choose a path below `/`")]
    Root,
    /// The operation failed.
    #[error("{path}: {}", errno.desc())]
    Failed {
        /// Path in the volume.
        path: String,
        /// Error number.
        errno: Errno,
    },
    /// A listing has too many entries.
    #[error("the listing of {path} has more than {limit} entries: list subdirectories")]
    Long {
        /// Path in the volume.
        path: String,
        /// Maximum number of entries.
        limit: usize,
    },
    /// The server of the volume failed.
    #[error("the server of the volume failed: {0}; repeat the call")]
    Server(#[source] io::Error),
}

/// Kinds of [`FileError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileErrorKind {
    /// The path or a parameter is invalid.
    Invalid,
    /// The path does not exist.
    NotFound,
    /// The path exists.
    Exists,
    /// The volume or the disk of the host is full.
    Full,
    /// The host failed.
    Internal,
}

impl FileError {
    /// Returns the kind.
    pub fn kind(&self) -> FileErrorKind {
        match self {
            Self::Failed { errno, .. } => match errno {
                Errno::ENOENT | Errno::ENOTDIR | Errno::ESTALE => FileErrorKind::NotFound,
                Errno::EEXIST | Errno::ENOTEMPTY => FileErrorKind::Exists,
                Errno::EDQUOT | Errno::ENOSPC => FileErrorKind::Full,
                Errno::EIO => FileErrorKind::Internal,
                _ => FileErrorKind::Invalid,
            },
            Self::Path(_) | Self::Root | Self::Long { .. } => FileErrorKind::Invalid,
            Self::Server(_) => FileErrorKind::Internal,
        }
    }
}

impl From<io::Error> for FileError {
    fn from(error: io::Error) -> Self {
        Self::Server(error)
    }
}
