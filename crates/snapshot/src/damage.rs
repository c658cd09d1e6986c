//! Damage that shows without reading layers.

use crate::{SnapshotError, Store, checksums};
use nix::libc::EIO;
use std::io;

impl Store {
    /// Looks for damage of snapshot `id`: files that are missing, have another size, or are small
    /// and differ from their checksums. Layers are not read, and ancestors not looked at.
    pub fn find_damage(&self, id: &str) -> Option<SnapshotError> {
        let looked = self.get(id);
        let looked = looked.and_then(|snapshot| checksums::verify_small_files(&snapshot));
        looked.err().filter(SnapshotError::is_damage)
    }
}

impl SnapshotError {
    /// Returns true if files of a snapshot are missing, unreadable or not as they were written.
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
