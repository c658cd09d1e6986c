//! Why an archive is not written, read or unpacked.

use rustix::io::Errno;
use std::io;

/// Why an archive is not written, read or unpacked. Entries are named as far as they can be shown.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The archive ends too early.
    #[error("the archive ends in the middle, after {}", after(.last))]
    Truncated {
        /// The last entry that was begun.
        last: Option<String>,
    },
    /// Its beginning is nothing that a tar archive begins with.
    #[error("the archive is broken: it is not a tar archive")]
    NotTar,
    /// The archive makes no sense.
    #[error("the archive is broken after {}: {problem}", after(.last))]
    Broken {
        /// The last entry that was begun.
        last: Option<String>,
        /// What is wrong.
        problem: &'static str,
    },
    /// An entry that is not unpacked.
    #[error("the archive's entry '{entry}' {problem}")]
    Entry {
        /// Its name.
        entry: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// What the archive comes from failed.
    #[error("cannot read the archive: {0}")]
    Read(io::Error),
    /// What the archive goes to failed; whoever reads it is gone, as a rule.
    #[error("cannot write the archive: {0}")]
    Send(io::Error),
    /// The file system refused.
    #[error("cannot {action} '{entry}': {source}")]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        entry: String,
        /// The kernel's word.
        source: io::Error,
    },
}

fn after(last: &Option<String>) -> String {
    last.as_ref()
        .map_or_else(|| "its beginning".to_owned(), |name| format!("'{name}'"))
}

impl ArchiveError {
    /// An entry that is not unpacked.
    pub fn entry(path: &[u8], problem: &'static str) -> Self {
        Self::Entry {
            entry: shown(path),
            problem,
        }
    }

    /// A refusal of the file system.
    pub fn file(action: &'static str, path: &[u8], errno: Errno) -> Self {
        Self::File {
            action,
            entry: shown(path),
            source: errno.into(),
        }
    }

    /// Whether the archive itself is to blame.
    pub fn is_malformed(&self) -> bool {
        matches!(
            self,
            Self::Truncated { .. } | Self::NotTar | Self::Broken { .. } | Self::Entry { .. }
        )
    }
}

/// A name out of an archive, for people: bounded, and without what a terminal would obey.
pub fn shown(name: &[u8]) -> String {
    const MOST: usize = 200;
    let text = String::from_utf8_lossy(name);
    let mut shown: String = (text.chars().take(MOST))
        .map(|c| if c.is_control() { '?' } else { c })
        .collect();
    if text.chars().nth(MOST).is_some() {
        shown.push('…');
    }
    shown
}
