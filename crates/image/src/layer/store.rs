//! Unpacked layers, each once, by content.

use super::apart::unpack;
use super::{LayerError, Limits, Unpacked};
use crate::builder;
use crate::file::{self, FileError, OnPath, UNFINISHED};
use crate::home::Home;
use crate::lock::Lock;
use std::fs::{self, DirBuilder};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const ROOT: &str = "root";
const RECORD: &str = "layer.json";
const LOCK: &str = "layers";
const PREFIX: &str = "sha256-";

/// `<home>/layers`: `sha256-<diff id>/root` and `layer.json` beside it. Whoever holds this holds the lock on all of them:
/// nothing is removed while an image is being made of them.
pub(crate) struct Layers {
    directory: PathBuf,
    /// Held, not used.
    _lock: Lock,
}

/// A layer that is unpacked.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub unpacked: Unpacked,
    pub root: PathBuf,
}

impl Layers {
    pub(crate) fn open(home: &Home, wait: impl FnOnce()) -> Result<Self, FileError> {
        Ok(Self::with(home, home.lock(LOCK, wait)?))
    }

    /// None while somebody else has them.
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

    /// The layer, if it has been unpacked.
    pub(crate) fn get(&self, diff_id: &str) -> Option<Layer> {
        let place = self.place(diff_id);
        let record = fs::read(place.join(RECORD)).ok()?;
        let unpacked = serde_json::from_slice(&record).ok()?;
        let root = place.join(ROOT);
        Some(Layer { unpacked, root })
    }

    /// Unpacks an archive, whose content must be `expected`.
    pub(crate) fn add(
        &self,
        packed: impl Read,
        expected: &str,
        limits: Limits,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<Layer, LayerError> {
        let new = self.unpack_aside(packed, limits, on_bytes)?;
        if new.unpacked.diff_id != expected {
            return Err(LayerError::Content {
                expected: expected.to_owned(),
                found: new.unpacked.diff_id.clone(),
            });
        }
        Ok(self.keep(new)?)
    }

    /// Unpacks an archive to look at it; it is gone when the result is.
    pub(crate) fn unpack_aside(
        &self,
        packed: impl Read,
        limits: Limits,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<Aside, LayerError> {
        let work = self.directory.join(format!("{UNFINISHED}layer"));
        builder::clear(&work)?;
        let make = |path: &Path, mode| DirBuilder::new().mode(mode).create(path).on("create", path);
        make(&work, 0o700)?;
        let mut aside = Aside {
            root: work.join(ROOT),
            work,
            unpacked: Unpacked::default(),
        };
        make(&aside.root, 0o755)?;
        aside.unpacked = unpack(packed, &aside.root, limits, on_bytes)?;
        Ok(aside)
    }

    /// Makes what was unpacked aside a layer.
    pub(crate) fn keep(&self, new: Aside) -> Result<Layer, FileError> {
        let place = self.place(&new.unpacked.diff_id);
        if let Some(layer) = self.get(&new.unpacked.diff_id) {
            return Ok(layer);
        }
        // Without a record it is what a crash left.
        builder::clear(&place)?;
        let record = serde_json::to_vec(&new.unpacked)
            .map_err(io::Error::other)
            .on("write", &new.work)?;
        file::write(&new.work, RECORD, &record)?;
        fs::rename(&new.work, &place).on("create", &place)?;
        file::sync_dir(&self.directory)?;
        Ok(Layer {
            unpacked: new.unpacked.clone(),
            root: place.join(ROOT),
        })
    }

    /// Removes every layer that is not named.
    pub(crate) fn retain(&self, named: &[String]) -> Result<(), FileError> {
        for entry in fs::read_dir(&self.directory).on("list", &self.directory)? {
            let path = entry.on("list", &self.directory)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let wanted = |id: &str| named.iter().any(|n| n == id);
            if name.strip_prefix(PREFIX).is_none_or(|id| !wanted(id)) {
                builder::clear(&path)?;
            }
        }
        Ok(())
    }

    pub(super) fn place(&self, diff_id: &str) -> PathBuf {
        Self::place_in(&self.directory, diff_id)
    }

    pub(super) fn place_in(layers: &Path, diff_id: &str) -> PathBuf {
        layers.join(format!("{PREFIX}{diff_id}"))
    }
}

/// An archive that was unpacked and is not a layer yet; its directory goes with it.
pub(crate) struct Aside {
    pub unpacked: Unpacked,
    pub root: PathBuf,
    work: PathBuf,
}

impl Drop for Aside {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the next to come. Once it is a layer there is nothing here.
        let _ = builder::clear(&self.work);
    }
}
