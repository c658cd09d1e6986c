//! Memory layer of a snapshot that has not all arrived on this host: its file has holes where
//! chunks are missing. A guest can be restored from it by one who gets them; everything else that
//! reads the layer refuses ([`SnapshotError::Incomplete`]).

use crate::snapshot::read;
use crate::snapshot_dir::SnapshotDir;
use crate::{Lineage, Snapshot, SnapshotError, Store};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// File that says that chunks are missing.
pub const MISSING_FILE: &str = "missing.json";
/// File by which the importer keeps what it has of the layer, until nothing is missing.
pub const PIN_FILE: &str = "memory.present";

/// Longest [`MISSING_FILE`] in bytes.
const MAX_MISSING_BYTES: u64 = 64 << 10;
/// File that asks for all chunks.
const PREFETCH_FILE: &str = "prefetch";

/// Missing chunks of a memory layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MissingMemory {
    /// Their place, in the importer's words.
    pub origin: String,
}

/// Returns true if no file of another host's snapshot has this name.
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
    /// Missing chunks of the memory layer; none: all of it is here.
    pub fn missing(&self) -> Result<Option<MissingMemory>, SnapshotError> {
        let path = self.path().join(MISSING_FILE);
        if !path.exists() {
            return Ok(None);
        }
        let text = read(&path, MAX_MISSING_BYTES)?;
        let missing = serde_json::from_slice(&text);
        missing
            .map(Some)
            .map_err(|e| SnapshotError::damaged(&path, e))
    }

    /// Path of [`PIN_FILE`].
    pub fn pin(&self) -> PathBuf {
        self.path().join(PIN_FILE)
    }

    /// Notes that nothing is missing any more. What has arrived must be on storage.
    pub fn set_complete(&self) -> Result<(), SnapshotError> {
        // The pin last: as long as something counts as missing, there is one.
        for name in [MISSING_FILE, PREFETCH_FILE, PIN_FILE] {
            let path = self.path().join(name);
            match fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(SnapshotError::io(&path)(e));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Asks that all missing chunks be got while a guest runs from it.
    pub fn want_all(&self) -> Result<(), SnapshotError> {
        match self.missing()? {
            Some(_) => SnapshotDir::at(self.path())?.create_once(PREFETCH_FILE, b""),
            None => Ok(()),
        }
    }

    /// Returns true if all missing chunks are to be got.
    pub fn wants_all(&self) -> bool {
        self.path().join(PREFETCH_FILE).exists()
    }

    /// Fails if chunks are missing.
    pub(crate) fn check_complete(&self) -> Result<(), SnapshotError> {
        match self.path().join(MISSING_FILE).exists() {
            true => Err(SnapshotError::Incomplete(self.id().to_owned())),
            false => Ok(()),
        }
    }
}

impl Store {
    /// Returns true if chunks of snapshot `id` are missing: a look for one file.
    pub fn is_incomplete(&self, id: &str) -> bool {
        self.root().join(id).join(MISSING_FILE).exists()
    }
}

impl Lineage {
    /// Returns true if no layer has missing chunks.
    pub fn is_complete(&self) -> bool {
        self.snapshots().iter().all(|s| s.check_complete().is_ok())
    }
}
