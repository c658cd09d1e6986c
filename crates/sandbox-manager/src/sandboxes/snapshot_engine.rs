//! Finds the engine of a snapshot: the record of a snapshot names the engine that has its files.

use super::OperationError;
use super::snapshot_catalog::SnapshotCatalog;
use jiffy_engine_api::{Engine, EngineError, Engines, SnapshotFiles};
use std::sync::Arc;

/// Snapshot whose files are on the disk, whether it has a record or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SnapshotOnDisk {
    pub id: String,
    /// Name of the engine that has its files.
    pub engine: String,
}

/// Snapshots on the disk, read lazily.
pub(super) type DiskWalk = Box<dyn Iterator<Item = Result<SnapshotOnDisk, EngineError>> + Send>;

/// Engines of this host, found by the records of snapshots.
pub(super) struct SnapshotEngines {
    engines: Engines,
    catalog: Arc<SnapshotCatalog>,
}

impl SnapshotEngines {
    pub fn new(engines: Engines, catalog: Arc<SnapshotCatalog>) -> Self {
        Self { engines, catalog }
    }

    /// Returns the engine of snapshot `id`. Locks the snapshot index.
    ///
    /// # Errors
    /// Fails if the snapshot has no record or if this host lacks its engine.
    pub fn engine_of(&self, id: &str) -> Result<&Arc<dyn Engine>, EngineError> {
        let snapshots = self.catalog.read();
        let record = snapshots.get(id).ok_or_else(|| EngineError::Failed {
            reason: format!("there is no snapshot {id}"),
        })?;
        // The reference is to the engines and not to the record, so the index is unlocked here.
        self.engines.get(&record.engine)
    }

    /// Returns the files of the engine of snapshot `id`. Locks the snapshot index.
    ///
    /// # Errors
    /// Fails like [`Self::engine_of`].
    pub fn files_of(&self, id: &str) -> Result<&dyn SnapshotFiles, EngineError> {
        Ok(self.engine_of(id)?.snapshot_files())
    }

    /// Returns the files of the engine with this name.
    ///
    /// # Errors
    /// Fails if this host lacks the engine.
    pub fn files(&self, engine: &str) -> Result<&dyn SnapshotFiles, EngineError> {
        self.engines.snapshot_files(engine)
    }

    /// Removes orphaned files of all engines. Returns their count. Blocks.
    pub fn gc(&self) -> Result<usize, OperationError> {
        let mut removed = 0;
        for engine in self.engines.all() {
            let collected = engine.snapshot_files().gc();
            removed += collected.map_err(OperationError::engine("remove orphaned files"))?;
        }
        Ok(removed)
    }

    /// Removes the files of a snapshot. Blocks.
    pub fn remove_files(&self, snapshot: &SnapshotOnDisk) -> Result<(), EngineError> {
        // By the name of the engine, since the snapshot may have no record.
        let files = self.engines.snapshot_files(&snapshot.engine)?;
        files.remove(&snapshot.id)
    }

    /// Walks the snapshots of all engines.
    pub fn walk_disk(&self) -> Result<DiskWalk, OperationError> {
        let mut all: DiskWalk = Box::new(std::iter::empty());
        for engine in self.engines.all() {
            let walk = engine.snapshot_files().walk();
            let walk = walk.map_err(OperationError::engine("read the snapshots of this host"))?;
            let engine = engine.name();
            let walk = walk.map(move |id| {
                Ok(SnapshotOnDisk {
                    id: id?,
                    engine: engine.to_owned(),
                })
            });
            all = Box::new(all.chain(walk));
        }
        Ok(all)
    }
}
