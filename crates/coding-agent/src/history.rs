//! History of a session: commands with their snapshots and changes.
//!
//! A *session* belongs to a project directory of the host. Its commands run in a sandbox, and can
//! be undone.

use crate::tree::{FileState, SyncedFile};
use crate::tree_path::TreePath;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// State of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommandStatus {
    /// The command has not been started.
    Preparing,
    /// The command is running.
    Running,
    /// The command has exited with this code.
    Exited(u8),
    /// The program that ran the command was killed, or lost its connection to the sandbox.
    Interrupted,
}

/// State of a file that can be restored: regular files have a saved copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedFile {
    /// State.
    pub state: FileState,
    /// Time of modification: seconds and nanoseconds.
    pub mtime: (i64, u32),
}

/// Change of a file of the host by a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChange {
    /// File before the command. `None` if it did not exist.
    pub before: Option<SavedFile>,
    /// File after the command. `None` if it was deleted.
    pub after: Option<FileState>,
}

impl FileChange {
    /// Returns the letter of the change: added, changed or deleted.
    pub fn letter(&self) -> char {
        match (&self.before, &self.after) {
            (None, _) => 'A',
            (_, Some(_)) => 'C',
            (_, None) => 'D',
        }
    }
}

/// File of the sandbox that was not copied to the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejection {
    /// Path in the project directory.
    pub path: TreePath,
    /// Reason.
    pub reason: String,
    /// Copy of the sandbox's version on the host. `None` if the sandbox has no such file.
    pub copy: Option<PathBuf>,
    /// True if the file was changed on both sides.
    pub is_conflict: bool,
}

/// Command of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryEntry {
    /// Number, unique in the session.
    pub number: u64,
    /// Shell command.
    pub command: String,
    /// Start: milliseconds since 1970.
    pub started_ms: u64,
    /// State.
    pub status: CommandStatus,
    /// Snapshot of the sandbox before the command.
    pub snapshot: Option<String>,
    /// Changes of the project directory by the command.
    pub changes: BTreeMap<TreePath, FileChange>,
    /// Files that were not copied to the host.
    pub rejected: Vec<Rejection>,
    /// Files whose entry in the synchronised tree (the last state that host and sandbox had in
    /// common) changed since the snapshot, with the entry at the time of the snapshot.
    pub synced_before: BTreeMap<TreePath, Option<SyncedFile>>,
}

impl HistoryEntry {
    /// Returns the hashes of the saved copies that the entry needs.
    pub fn saved_hashes(&self) -> impl Iterator<Item = &str> {
        let states = self.changes.values().filter_map(|c| c.before.as_ref());
        states.filter_map(|saved| match &saved.state.content {
            crate::tree::Content::File { hash, .. } => Some(hash.as_str()),
            _ => None,
        })
    }
}
