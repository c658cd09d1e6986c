//! Entries of a volume as clients see them.

use jiffy_volume_server::Attributes;
use nix::libc;

/// Type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Pipe, socket or device.
    Other,
}

/// File, directory or other node at a path.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Absolute path in the volume.
    pub path: String,
    /// Attributes.
    pub attributes: Attributes,
    /// Target of a symbolic link.
    pub target: Option<String>,
}

impl Entry {
    /// Returns the last component of the path. Empty for the root.
    pub fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// Returns the type.
    pub fn kind(&self) -> EntryKind {
        match self.attributes.mode & libc::S_IFMT {
            libc::S_IFREG => EntryKind::File,
            libc::S_IFDIR => EntryKind::Directory,
            libc::S_IFLNK => EntryKind::Symlink,
            _ => EntryKind::Other,
        }
    }

    /// Returns the permissions.
    pub fn permissions(&self) -> u32 {
        self.attributes.mode & 0o7777
    }
}
