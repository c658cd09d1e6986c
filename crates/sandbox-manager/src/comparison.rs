//! Comparison of the files of two sandboxes of one template, by their changes against it.
//!
//! Each side lists only its changes against the template. A file that a side does not list is as in
//! the template. All input comes from guests and is untrusted.

mod listing;

pub use listing::FileListing;

use jiffy_agent_client::comparison::FileState;
use std::collections::BTreeSet;

/// File, directory or symbolic link that differs between two sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileDifference {
    /// Absolute path.
    pub path: Vec<u8>,
    /// Kind of the difference.
    pub kind: DifferenceKind,
    /// State on the first side. `None` if the file was added.
    pub a: Option<FileState>,
    /// State on the second side. `None` if the file was removed.
    pub b: Option<FileState>,
    /// False if the contents have the same type and size and could not be compared.
    pub is_verified: bool,
}

/// Kind of a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DifferenceKind {
    /// Only the second side has the file.
    Added,
    /// Both sides have the file, with different contents, permissions or owners.
    Changed,
    /// Only the first side has the file.
    Removed,
}

/// Result of the comparison of two listings.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Differences, sorted by path.
    pub differences: Vec<FileDifference>,
    /// Files of equal type, size, permissions and owner, whose contents must be compared.
    pub candidates: Vec<Candidate>,
}

/// File whose contents must be compared.
#[derive(Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Absolute path.
    pub path: Vec<u8>,
    /// State on both sides.
    pub state: FileState,
}

/// Existence of a file on one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Absent,
    /// As in the template, where the file may not exist.
    AsTemplate,
    Present(FileState),
}

impl Comparison {
    /// Compares two listings.
    pub fn of(a: &FileListing, b: &FileListing) -> Self {
        let paths: BTreeSet<&[u8]> = a.paths().chain(b.paths()).collect();
        let mut comparison = Self::default();
        for path in paths {
            let a_state = state(a, b, path);
            let b_state = state(b, a, path);
            let kind = match (a_state, b_state) {
                (None, None) => continue,
                (None, Some(_)) => DifferenceKind::Added,
                (Some(_), None) => DifferenceKind::Removed,
                (Some(before), Some(after)) if is_different(&before, &after) => {
                    DifferenceKind::Changed
                }
                // Only regular files and symbolic links have contents.
                (Some(_), Some(state)) if matches!(state.kind, 'f' | 'l') => {
                    let path = path.to_vec();
                    comparison.candidates.push(Candidate { path, state });
                    continue;
                }
                _ => continue,
            };
            comparison.differences.push(FileDifference {
                path: path.to_vec(),
                kind,
                a: a_state,
                b: b_state,
                is_verified: true,
            });
        }
        comparison
    }

    /// Returns all differences, sorted by path. `a` and `b` are the hashes of the candidates'
    /// contents on each side, in the order of `candidates`. A hash is `None` if the content could
    /// not be read.
    pub fn with_hashes(
        mut self,
        a: &[Option<String>],
        b: &[Option<String>],
    ) -> Vec<FileDifference> {
        for (candidate, hashes) in self.candidates.into_iter().zip(a.iter().zip(b)) {
            let is_verified = match hashes {
                (Some(a), Some(b)) if a == b => continue,
                (Some(_), Some(_)) => true,
                _ => false,
            };
            self.differences.push(FileDifference {
                path: candidate.path,
                kind: DifferenceKind::Changed,
                a: Some(candidate.state),
                b: Some(candidate.state),
                is_verified,
            });
        }
        self.differences.sort_by(|a, b| a.path.cmp(&b.path));
        self.differences
    }
}

/// Returns the state of a file on the side `own`. `other` may know its state in the template.
fn state(own: &FileListing, other: &FileListing, path: &[u8]) -> Option<FileState> {
    match own.presence(path) {
        Presence::Absent => None,
        Presence::Present(state) => Some(state),
        Presence::AsTemplate => other.template_state(path),
    }
}

fn is_different(a: &FileState, b: &FileState) -> bool {
    // The size of a directory has no meaning here.
    let size = |state: &FileState| (state.kind != 'd').then_some(state.size);
    (a.kind, a.mode, a.uid, a.gid, size(a)) != (b.kind, b.mode, b.uid, b.gid, size(b))
}

#[cfg(test)]
mod tests;
