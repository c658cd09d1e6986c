//! Memory layers that are not completely stored on this host: the file has holes in place of
//! missing chunks.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *layer* is the part of a memory or disk that one
//! snapshot stores: the content that differs from its ancestors.
//!
//! A guest can be restored from such a snapshot if the caller provides a source of the chunks.
//! Merges, folds, transfers ([`crate::Store::parts`]) and new checksums fail with
//! [`SnapshotError::Incomplete`]. Other readers of the layer must check
//! [`crate::Lineage::is_complete`] themselves.
//!
//! The *importer* is the caller of [`crate::Store::import`]. It fetches snapshots from a shared
//! store, and caches their chunks.

use crate::snapshot::read_file;
use crate::snapshot_dir::SnapshotDir;
use crate::{Snapshot, SnapshotError};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Name of the file that marks a snapshot with missing chunks.
pub const MISSING_FILE: &str = "missing.json";
/// Name of the file that lists the chunks that are present. While it exists, the importer's cache
/// retains the chunks.
pub const PIN_FILE: &str = "memory.present";

/// Maximum size of [`MISSING_FILE`], in bytes.
const MAX_MISSING_BYTES: u64 = 64 << 10;
/// Name of the file that requests all missing chunks.
const PREFETCH_FILE: &str = "prefetch";

/// Origin of the missing chunks of a memory layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MissingMemory {
    /// Location of the chunks, in the format of the importer.
    pub origin: String,
}

/// Returns whether `name` is reserved on this host: no imported file may have this name.
pub fn is_reserved(name: &str) -> bool {
    [MISSING_FILE, PIN_FILE, PREFETCH_FILE].contains(&name)
}

impl MissingMemory {
    pub(crate) fn write(&self, dir: &Path) -> Result<(), SnapshotError> {
        let path = dir.join(MISSING_FILE);
        let text = serde_json::to_vec(self).map_err(|e| SnapshotError::damaged(&path, e))?;
        SnapshotDir::at(dir)?.create_once(MISSING_FILE, &text)
    }
}

impl Snapshot {
    /// Returns the origin of the missing chunks. `None` if no chunks are missing.
    pub fn missing(&self) -> Result<Option<MissingMemory>, SnapshotError> {
        let path = self.path().join(MISSING_FILE);
        // Another thread removes the file when the last chunk was fetched, so a separate check
        // whether it exists would be a race.
        let file = match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(SnapshotError::io(&path))?,
        };
        let text = read_file(file, &path, MAX_MISSING_BYTES)?;
        let missing = serde_json::from_slice(&text);
        missing
            .map(Some)
            .map_err(|e| SnapshotError::damaged(&path, e))
    }

    /// Returns the path of [`PIN_FILE`].
    pub fn pin(&self) -> PathBuf {
        self.path().join(PIN_FILE)
    }

    /// Records that no chunks are missing. All chunks must be durable.
    pub fn set_complete(&self) -> Result<(), SnapshotError> {
        // Remove the pin last: it must exist while chunks count as missing.
        for name in [MISSING_FILE, PREFETCH_FILE, PIN_FILE] {
            let path = self.path().join(name);
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(SnapshotError::io(&path)(e));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Requests that all missing chunks are fetched while a guest runs from the snapshot.
    pub fn request_all(&self) -> Result<(), SnapshotError> {
        match self.missing()? {
            Some(_) => SnapshotDir::at(self.path())?.create_once(PREFETCH_FILE, b""),
            None => Ok(()),
        }
    }

    /// Returns whether all missing chunks were requested.
    pub fn is_all_requested(&self) -> bool {
        self.path().join(PREFETCH_FILE).exists()
    }

    /// Fails if chunks are missing.
    pub(crate) fn check_complete(&self) -> Result<(), SnapshotError> {
        if self.path().join(MISSING_FILE).exists() {
            Err(SnapshotError::Incomplete(self.id().to_owned()))
        } else {
            Ok(())
        }
    }
}
