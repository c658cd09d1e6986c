//! Limits of a session: numbers and sizes of files.

use serde::{Deserialize, Serialize};

/// Maximum number of files in the project directory, and of files in the sandbox's copy.
pub const MAX_FILES: usize = 500_000;
/// Maximum size of all files that are copied at once, in bytes.
pub const MAX_COPY_BYTES: u64 = 16 << 30;
/// Maximum number of paths in a message.
pub const MAX_SHOWN_PATHS: usize = 20;

/// Limits of the data that a session stores for undo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionLimits {
    /// Maximum number of commands in the history.
    pub commands: usize,
    /// Maximum size of the saved copies of changed and deleted files, in bytes.
    pub saved_bytes: u64,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            commands: 30,
            saved_bytes: 1 << 30,
        }
    }
}
