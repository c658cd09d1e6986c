//! Files of the project: their states, and the states at the last synchronisation.

use crate::tree_path::{TreePath, decode, encode};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;

/// Permission bits that are synchronised. Set-user-id bits are not.
pub const MODE_BITS: u32 = 0o777;

/// Content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// Regular file.
    File {
        /// Size in bytes.
        size: u64,
        /// BLAKE3 hash in hexadecimal digits.
        hash: String,
    },
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink(LinkTarget),
}

/// Target of a symbolic link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkTarget(pub Vec<u8>);

impl Serialize for LinkTarget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for LinkTarget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(decode(&String::deserialize(deserializer)?)))
    }
}

/// State of a file. Two files with the same state are equal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// Permission bits. 0 for symbolic links, which have none.
    pub mode: u32,
    /// Content.
    pub content: Content,
}

impl FileState {
    /// Returns whether the file is a directory.
    pub fn is_directory(&self) -> bool {
        self.content == Content::Directory
    }
}

/// Metadata that changes whenever the content of a file changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// Size in bytes.
    pub size: u64,
    /// Time of modification: seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Time of the last change of content or metadata.
    pub ctime: (i64, u32),
    /// Number of the inode.
    pub inode: u64,
}

/// File in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedFile {
    /// Type, and target of a symbolic link.
    pub kind: ListedKind,
    /// Permission bits. 0 for symbolic links.
    pub mode: u32,
    /// Metadata.
    pub stamp: Stamp,
}

/// Type of a listed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListedKind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink(LinkTarget),
}

impl ListedFile {
    /// Returns the state, which for a regular file needs the hash of its content.
    pub fn state(&self, hash: impl FnOnce() -> String) -> FileState {
        let content = match &self.kind {
            ListedKind::File => Content::File {
                size: self.stamp.size,
                hash: hash(),
            },
            ListedKind::Directory => Content::Directory,
            ListedKind::Symlink(target) => Content::Symlink(target.clone()),
        };
        FileState {
            mode: self.mode,
            content,
        }
    }

    /// Returns the state if it is known without reading the file: the file is not a regular file,
    /// or has the metadata with which `known` was recorded.
    pub fn known_state(&self, known: Option<(&FileState, Option<Stamp>)>) -> Option<FileState> {
        if self.kind != ListedKind::File {
            return Some(self.state(String::new));
        }
        let (state, stamp) = known?;
        let is_same = stamp == Some(self.stamp)
            && state.mode == self.mode
            && matches!(state.content, Content::File { .. });
        is_same.then(|| state.clone())
    }
}

/// Files of a directory tree.
pub type Listing = BTreeMap<TreePath, ListedFile>;

/// File that host and sandbox have in common since the last synchronisation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncedFile {
    /// State on both sides.
    pub state: FileState,
    /// Metadata on the host. `None` if unknown.
    pub host: Option<Stamp>,
    /// Metadata in the sandbox. `None` if unknown.
    pub guest: Option<Stamp>,
}

/// Files at the last synchronisation.
pub type SyncedTree = BTreeMap<TreePath, SyncedFile>;
