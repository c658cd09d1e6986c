//! Errors of archives.

use rustix::io::Errno;
use std::io;

/// Error while writing, reading or unpacking an archive. Names of entries are made printable.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The archive is truncated.
    #[error("the archive ends in the middle, after {}", after(.last))]
    Truncated {
        /// Last entry that was started.
        last: Option<String>,
    },
    /// The input does not start with the header of a tar archive.
    #[error("the archive is broken: it is not a tar archive")]
    NotTar,
    /// The archive is invalid.
    #[error("the archive is broken after {}: {problem}", after(.last))]
    Broken {
        /// Last entry that was started.
        last: Option<String>,
        /// Problem.
        problem: &'static str,
    },
    /// The entry is rejected.
    #[error("the archive's entry '{entry}' {problem}")]
    Entry {
        /// Name of the entry.
        entry: String,
        /// Problem.
        problem: &'static str,
    },
    /// The input cannot be read.
    #[error("cannot read the archive: {0}")]
    Read(io::Error),
    /// The output cannot be written, usually because its reader has exited.
    #[error("cannot write the archive: {0}")]
    Send(io::Error),
    /// An operation of the file system failed.
    #[error("cannot {action} '{entry}': {source}")]
    File {
        /// Failed action.
        action: &'static str,
        /// Path.
        entry: String,
        /// Error of the system call.
        source: io::Error,
    },
}

/// Returns the position of an error for a message.
fn after(last: &Option<String>) -> String {
    last.as_ref()
        .map_or_else(|| "its beginning".to_owned(), |name| format!("'{name}'"))
}

impl ArchiveError {
    /// Creates the error of a rejected entry.
    pub fn entry(path: &[u8], problem: &'static str) -> Self {
        Self::Entry {
            entry: shown(path),
            problem,
        }
    }

    /// Creates the error of a failed file system operation.
    pub fn file(action: &'static str, path: &[u8], errno: Errno) -> Self {
        Self::File {
            action,
            entry: shown(path),
            source: errno.into(),
        }
    }

    /// Returns true if the archive is invalid.
    pub fn is_malformed(&self) -> bool {
        matches!(
            self,
            Self::Truncated { .. } | Self::NotTar | Self::Broken { .. } | Self::Entry { .. }
        )
    }
}

/// Returns the name of an entry for display: bounded, without control characters.
pub fn shown(name: &[u8]) -> String {
    const MAX_NAME_CHARS: usize = 200;
    let text = String::from_utf8_lossy(name);
    let mut shown: String = (text.chars().take(MAX_NAME_CHARS))
        .map(|c| if c.is_control() { '?' } else { c })
        .collect();
    if text.chars().nth(MAX_NAME_CHARS).is_some() {
        shown.push('…');
    }
    shown
}
