//! Errors of archives.

use rustix::io::Errno;
use std::io;

/// Error of writing, reading or unpacking an archive. Names of entries are made printable.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The archive ends too early.
    #[error("the archive ends in the middle, after {}", after(.last))]
    Truncated {
        /// Last entry that was started.
        last: Option<String>,
    },
    /// The first bytes belong to no tar archive.
    #[error("the archive is broken: it is not a tar archive")]
    NotTar,
    /// Invalid archive.
    #[error("the archive is broken after {}: {problem}", after(.last))]
    Broken {
        /// Last entry that was started.
        last: Option<String>,
        /// Problem.
        problem: &'static str,
    },
    /// An entry that is not unpacked.
    #[error("the archive's entry '{entry}' {problem}")]
    Entry {
        /// Name of the entry.
        entry: String,
        /// Problem.
        problem: &'static str,
    },
    /// Read error of the input.
    #[error("cannot read the archive: {0}")]
    Read(io::Error),
    /// Write error of the output, usually since its reader has ended.
    #[error("cannot write the archive: {0}")]
    Send(io::Error),
    /// Error of the file system.
    #[error("cannot {action} '{entry}': {source}")]
    File {
        /// Failed action.
        action: &'static str,
        /// Its path.
        entry: String,
        /// Error of the kernel.
        source: io::Error,
    },
}

fn after(last: &Option<String>) -> String {
    last.as_ref()
        .map_or_else(|| "its beginning".to_owned(), |name| format!("'{name}'"))
}

impl ArchiveError {
    /// Error of an entry.
    pub fn entry(path: &[u8], problem: &'static str) -> Self {
        Self::Entry {
            entry: shown(path),
            problem,
        }
    }

    /// Error of the file system.
    pub fn file(action: &'static str, path: &[u8], errno: Errno) -> Self {
        Self::File {
            action,
            entry: shown(path),
            source: errno.into(),
        }
    }

    /// Tells if the archive is invalid.
    pub fn is_malformed(&self) -> bool {
        matches!(
            self,
            Self::Truncated { .. } | Self::NotTar | Self::Broken { .. } | Self::Entry { .. }
        )
    }
}

/// Name of an entry for display: bounded, without control characters.
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
