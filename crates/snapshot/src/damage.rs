//! Detection of damage that does not require reading layers.

use crate::{SnapshotError, Store, checksums};
use nix::libc::EIO;
use std::io;

impl Store {
    /// Checks snapshot `id` for damage: missing files, files of unexpected size, and small files
    /// that differ from their checksums. Layers are not read, and ancestors are not checked.
    pub fn find_damage(&self, id: &str) -> Option<SnapshotError> {
        let snapshot = self.get(id);
        let checked = snapshot.and_then(|snapshot| checksums::verify_small_files(&snapshot));
        checked.err().filter(SnapshotError::is_damage)
    }
}

impl SnapshotError {
    /// Returns whether files of a snapshot are missing, unreadable or have unexpected content.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Missing(_) | Self::Damaged { .. } => true,
            Self::Io { source, .. } => {
                source.kind() == io::ErrorKind::NotFound || source.raw_os_error() == Some(EIO)
            }
            _ => false,
        }
    }
}
