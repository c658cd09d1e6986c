//! Mounts that only one process and its children see. The template builder sends them with the
//! request that starts a command.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Maximum number of mounts of one process.
pub const MAX_PROCESS_MOUNTS: usize = 64;

/// Mounts and additional variables of a process. Lists of processes do not show the variables.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessMounts {
    /// Existing directory, which is hidden from the process while its files are created.
    pub scratch: String,
    /// Mounts in order.
    pub mounts: Vec<ProcessMount>,
    /// Variables that contain secrets.
    pub env: BTreeMap<String, Secret>,
}

/// One mount. Sources and targets are absolute paths of existing files or directories.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProcessMount {
    /// A file or directory at another path.
    Bind {
        /// Source.
        source: String,
        /// Target.
        target: String,
        /// If set, the process cannot write.
        read_only: bool,
    },
    /// An empty directory in memory.
    Tmpfs {
        /// Target.
        target: String,
        /// Maximum size in bytes.
        size_bytes: Option<u64>,
    },
    /// A file in memory.
    File {
        /// Target.
        target: String,
        /// Content in base64.
        content: Secret,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
        /// Permissions.
        mode: u32,
    },
}

/// Text that logs must not show.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}
