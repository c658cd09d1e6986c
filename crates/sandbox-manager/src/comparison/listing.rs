//! [`FileListing`]: the changes of one side of a comparison against the template, as the agent of
//! its guest reports them. The report is untrusted, and checked here.
//!
//! A directory of a guest usually shows the files of the template, except for changed and deleted
//! ones. It hides the template if the guest has, for example, deleted and created it again: it then
//! shows only files of the guest, and the agent lists all of them.

use super::Presence;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_agent_client::comparison::{DetailedChange, DetailedChanges, FileState};
use std::collections::BTreeMap;

/// Maximum length of a path in bytes, as in Linux.
const MAX_PATH_BYTES: usize = 4096;

/// Reason why a listing cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ListingError {
    /// The agent does not report the states of files.
    #[error(
        "its agent is of an earlier version, which does not report sizes: take a new snapshot of a sandbox that was started with this version"
    )]
    EarlierAgent,
    /// The agent reports an impossible change.
    #[error("its agent reported an invalid file")]
    Invalid,
}

/// Files that a side created, changed or deleted.
#[derive(Debug, Default)]
pub struct FileListing {
    /// Files by path.
    files: BTreeMap<Vec<u8>, ListedFile>,
    /// True if changes are missing.
    pub is_incomplete: bool,
}

/// File that differs from the template.
#[derive(Debug, Clone, Copy)]
struct ListedFile {
    /// Present state. `None` if the file was deleted.
    now: Option<FileState>,
    /// State in the template. `None` if the template does not have the file.
    before: Option<FileState>,
    /// True if no file of the template is visible below this path. This is the case for a new or
    /// deleted file, for a file that is or was no directory, and for a directory whose files are
    /// all listed.
    hides_template: bool,
}

impl FileListing {
    /// Checks and indexes the answer of an agent.
    pub fn of(changes: DetailedChanges) -> Result<Self, ListingError> {
        let mut files = BTreeMap::new();
        for change in changes.changes {
            // Kinds of changes: `A` added, `C` changed, `D` deleted. The agents of earlier versions
            // report only the kind.
            let file = match (change.kind, change.now, change.before) {
                ('A', Some(now), None) => ListedFile {
                    now: Some(now),
                    before: None,
                    hides_template: true,
                },
                ('C', Some(now), Some(before)) => ListedFile {
                    now: Some(now),
                    before: Some(before),
                    hides_template: change.complete || now.kind != 'd' || before.kind != 'd',
                },
                ('D', None, Some(before)) => ListedFile {
                    now: None,
                    before: Some(before),
                    hides_template: true,
                },
                ('A' | 'C' | 'D', None, None) => return Err(ListingError::EarlierAgent),
                _ => return Err(ListingError::Invalid),
            };
            files.insert(path_of(change)?, file);
        }
        Ok(Self {
            files,
            is_incomplete: changes.more,
        })
    }

    /// Returns the paths of the listed files.
    pub(super) fn paths(&self) -> impl Iterator<Item = &[u8]> {
        self.files.keys().map(Vec::as_slice)
    }

    /// Returns the state of a listed file in the template.
    pub(super) fn template_state(&self, path: &[u8]) -> Option<FileState> {
        self.files.get(path)?.before
    }

    /// Returns whether a file exists on this side.
    pub(super) fn presence(&self, path: &[u8]) -> Presence {
        if let Some(file) = self.files.get(path) {
            return file.now.map_or(Presence::Absent, Presence::Present);
        }
        // The nearest listed directory decides: it shows the files of the template or hides them.
        let mut above = path;
        while let Some(end) = above.iter().rposition(|byte| *byte == b'/') {
            above = &above[..end];
            match self.files.get(above) {
                Some(file) if file.hides_template => return Presence::Absent,
                Some(_) => return Presence::AsTemplate,
                None => {}
            }
        }
        Presence::AsTemplate
    }
}

/// Returns the bytes of a path.
fn path_of(change: DetailedChange) -> Result<Vec<u8>, ListingError> {
    let path = match change.path_bytes {
        Some(bytes) => STANDARD.decode(bytes).map_err(|_| ListingError::Invalid)?,
        None => change.path.into_bytes(),
    };
    let is_valid = path.starts_with(b"/") && path.len() <= MAX_PATH_BYTES && !path.contains(&0);
    is_valid.then_some(path).ok_or(ListingError::Invalid)
}
