//! Errors of unpacking a layer of a container image.

use crate::erofs::LayerOfImageError;
use crate::file::FileError;
use jiffy_archive::ArchiveError;
use jiffy_archive::error::shown;
use std::io;

/// Error of unpacking a layer.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// A limit of [`super::UnpackLimits`] is exceeded.
    #[error("it exceeds a limit: more {what} than {limit}")]
    TooMuch { what: &'static str, limit: String },
    /// The unpacked bytes exceed the owner's disk budget.
    #[error("{message}")]
    Budget { message: String },
    #[error("it is truncated: download or create it again")]
    Truncated,
    #[error("{0}")]
    Problem(EntryProblem),
    /// Invalid archive.
    #[error("{0}")]
    Archive(ArchiveError),
    /// Invalid entry, with its name.
    #[error("its entry `{entry}` {problem}")]
    Entry {
        entry: String,
        problem: EntryProblem,
    },
    #[error("its content has sha256 {found} instead of {expected}: download it again")]
    Content { expected: String, found: String },
    #[error("cannot read it: {0}")]
    Read(io::Error),
    /// Invalid image of a template.
    #[error(transparent)]
    Image(#[from] LayerOfImageError),
    #[error(
        "the disk is full at `{entry}`: free some space, for example with `jiffy template \
         rm`, and run again"
    )]
    DiskFull { entry: String },
    #[error("cannot {action} `{entry}`")]
    Write {
        action: &'static str,
        entry: String,
        source: io::Error,
    },
    #[error(transparent)]
    File(#[from] FileError),
    /// Error reported by the unpacker process.
    #[error("{0}")]
    Reported(String),
    #[error("the process that unpacks it failed: {0}")]
    Process(String),
}

/// Problem with an archive or one of its entries.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EntryProblem {
    #[error("it is not a tar archive, either uncompressed or compressed with gzip or zstd")]
    NotTar,
    #[error(
        "it is compressed with {0}, which is not supported: decompress it first, or use gzip or zstd"
    )]
    Compression(&'static str),
    #[error("has a zero byte in its name")]
    ZeroByte,
    #[error("leads out of the root with `..`")]
    Outside,
    #[error("goes through a symbolic link or a file in place of a directory")]
    Through,
    #[error("is a hard link to `{0}`, which is not an earlier file of the archive")]
    LinkTarget(String),
    #[error("replaces a directory with another type of file")]
    ReplacesDirectory,
    #[error("has a path that is too long or too deep")]
    Path,
}

impl LayerError {
    /// Converts a read error: an error of this crate that was wrapped, an unexpected end, or an I/O
    /// error.
    pub(crate) fn read(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Truncated,
            // `io::Error` is only the transport of an error through `Read` implementations.
            _ if error.get_ref().is_some_and(|e| e.is::<Self>()) => {
                match error.into_inner().map(|e| e.downcast::<Self>()) {
                    Some(Ok(own)) => *own,
                    // Never reached: the guard above has checked the type.
                    _ => Self::Truncated,
                }
            }
            _ => Self::Read(error),
        }
    }

    pub(super) fn entry(path: &[u8], problem: EntryProblem) -> Self {
        Self::Entry {
            entry: shown(path),
            problem,
        }
    }

    pub(super) fn write(action: &'static str, path: &[u8], errno: rustix::io::Errno) -> Self {
        use rustix::io::Errno;
        let entry = shown(path);
        // For an attribute, ENOSPC means that the inode has no space for it. The disk is not full.
        if matches!(errno, Errno::NOSPC | Errno::DQUOT) && action != "set an attribute of" {
            return Self::DiskFull { entry };
        }
        Self::Write {
            action,
            entry,
            source: errno.into(),
        }
    }
}

impl From<ArchiveError> for LayerError {
    fn from(error: ArchiveError) -> Self {
        match error {
            ArchiveError::Truncated { .. } => Self::Truncated,
            ArchiveError::NotTar => Self::Problem(EntryProblem::NotTar),
            ArchiveError::Read(e) => Self::read(e),
            other => Self::Archive(other),
        }
    }
}
