//! Store of unpacked layers, `<home>/layers`. Each layer is stored once, under its *diff id*, the
//! SHA-256 of the uncompressed archive, and shared by all imports.

mod proof;

pub(crate) use proof::{BlobProofs, Repository};

use super::confined::unpack;
use super::{ByteMeter, LayerError, UnpackLimits, UnpackedLayer};
use crate::file::{self, FileError, OnPath, UNFINISHED};
use crate::home::Home;
use crate::lock::Lock;
use crate::work_dir::remove_tree;
use std::fs::{self, DirBuilder};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Subdirectory of a layer with its files.
const ROOT: &str = "root";
/// File of a layer with its description.
const RECORD_FILE: &str = "layer.json";
/// Lock on the directory of the layers.
const LOCK: &str = "layers";
/// Part of a directory name before the diff id of the layer.
const PREFIX: &str = "sha256-";

/// The layers in `<home>/layers`. The directory `sha256-<diff id>/` contains the files in `root`,
/// and `layer.json`. Holds the lock of the store: no other process adds or removes a layer while
/// this value exists.
pub(crate) struct LayerStore {
    directory: PathBuf,
    /// Held until drop.
    _lock: Lock,
}

/// A complete layer of the store.
#[derive(Clone, Debug)]
pub(crate) struct StoredLayer {
    pub unpacked: UnpackedLayer,
    pub root: PathBuf,
}

impl LayerStore {
    /// Opens the store. If another process holds its lock, calls `wait` once and waits for the
    /// lock.
    pub(crate) fn open(home: &Home, wait: impl FnOnce()) -> Result<Self, FileError> {
        Ok(Self::with(home, home.lock(LOCK, wait)?))
    }

    /// Opens the store. Returns `None` if another process holds its lock.
    pub(crate) fn try_open(home: &Home) -> Result<Option<Self>, FileError> {
        let lock = home.try_lock(LOCK)?;
        Ok(lock.map(|lock| Self::with(home, lock)))
    }

    fn with(home: &Home, lock: Lock) -> Self {
        Self {
            directory: home.layers(),
            _lock: lock,
        }
    }

    /// Returns the layer if it is in the store.
    pub(crate) fn get(&self, diff_id: &str) -> Option<StoredLayer> {
        let place = self.place(diff_id);
        let record = fs::read(place.join(RECORD_FILE)).ok()?;
        let unpacked = serde_json::from_slice(&record).ok()?;
        let root = place.join(ROOT);
        Some(StoredLayer { unpacked, root })
    }

    /// Unpacks an archive with the diff id `expected` into the store. Calls `meter` before the
    /// bytes are written.
    pub(crate) fn add(
        &self,
        packed: impl Read,
        expected: &str,
        limits: UnpackLimits,
        meter: ByteMeter<'_>,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<StoredLayer, LayerError> {
        let new = self.unpack_pending(packed, limits, meter, on_bytes)?;
        if new.unpacked.diff_id != expected {
            return Err(LayerError::Content {
                expected: expected.to_owned(),
                found: new.unpacked.diff_id.clone(),
            });
        }
        Ok(self.commit(new)?)
    }

    /// Unpacks an archive whose diff id is not known in advance. The files are removed on drop
    /// unless [`Self::commit`] is called.
    pub(crate) fn unpack_pending(
        &self,
        packed: impl Read,
        limits: UnpackLimits,
        meter: ByteMeter<'_>,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<PendingLayer, LayerError> {
        // The lock of the store allows only one unpacking at a time, so one name suffices.
        let work = self.directory.join(format!("{UNFINISHED}layer"));
        // A killed process may have left files.
        remove_tree(&work)?;
        let make = |path: &Path, mode| DirBuilder::new().mode(mode).create(path).on("create", path);
        make(&work, 0o700)?;
        let mut pending = PendingLayer {
            root: work.join(ROOT),
            work,
            unpacked: UnpackedLayer::default(),
        };
        make(&pending.root, 0o755)?;
        pending.unpacked = unpack(packed, &pending.root, limits, meter, on_bytes)?;
        Ok(pending)
    }

    /// Moves an unpacked archive into the store.
    pub(crate) fn commit(&self, new: PendingLayer) -> Result<StoredLayer, FileError> {
        let place = self.place(&new.unpacked.diff_id);
        // The layer may have been added by an earlier archive of the same import.
        if let Some(layer) = self.get(&new.unpacked.diff_id) {
            return Ok(layer);
        }
        // A directory without `layer.json` was left by a crash.
        remove_tree(&place)?;
        // The files were flushed by `unpack`. The record comes next and the rename last, so that a
        // layer with a record is always complete.
        let record = serde_json::to_vec(&new.unpacked)
            .map_err(io::Error::other)
            .on("write", &new.work)?;
        file::write(&new.work, RECORD_FILE, &record)?;
        fs::rename(&new.work, &place).on("create", &place)?;
        file::sync_dir(&self.directory)?;
        Ok(StoredLayer {
            unpacked: new.unpacked.clone(),
            root: place.join(ROOT),
        })
    }

    /// Removes all layers except the layers in `named`.
    pub(crate) fn retain(&self, named: &[String]) -> Result<(), FileError> {
        for entry in fs::read_dir(&self.directory).on("list", &self.directory)? {
            let path = entry.on("list", &self.directory)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let is_named = |id: &str| named.iter().any(|n| n == id);
            // The condition also removes unfinished layers, whose names lack the prefix.
            if name.strip_prefix(PREFIX).is_none_or(|id| !is_named(id)) {
                remove_tree(&path)?;
            }
        }
        Ok(())
    }

    fn place(&self, diff_id: &str) -> PathBuf {
        Self::place_in(&self.directory, diff_id)
    }

    fn place_in(layers: &Path, diff_id: &str) -> PathBuf {
        layers.join(format!("{PREFIX}{diff_id}"))
    }
}

/// An unpacked archive outside of the store. It is removed on drop.
pub(crate) struct PendingLayer {
    pub unpacked: UnpackedLayer,
    pub root: PathBuf,
    work: PathBuf,
}

impl Drop for PendingLayer {
    fn drop(&mut self) {
        // Ignore the error: the next import removes the remains. After `commit`, the directory has
        // another name and the call has no effect.
        let _ = remove_tree(&self.work);
    }
}
