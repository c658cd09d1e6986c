//! Operations on the snapshot files of gVisor sandboxes. All except the import work even if gVisor
//! cannot be used.

use super::{GvisorEngine, parts};
use async_trait::async_trait;
use jiffy_engine_api::{
    EngineError, ExistingSnapshot, GVISOR, ImportedFiles, SnapshotFiles, SnapshotImport,
    SnapshotParts, SnapshotWalk, VerifiedSnapshot,
};

#[async_trait]
impl SnapshotFiles for GvisorEngine {
    fn ids(&self) -> Result<Vec<String>, EngineError> {
        self.store.ids().map_err(EngineError::failed)
    }

    fn walk(&self) -> Result<SnapshotWalk, EngineError> {
        let walk = self.store.walk().map_err(EngineError::failed)?;
        Ok(Box::new(walk.map(|id| id.map_err(EngineError::failed))))
    }

    fn size(&self, id: &str) -> Option<u64> {
        self.store.size(id)
    }

    fn is_current(&self, template: &str, id: &str) -> bool {
        let taken = self.store.get(id).map(|manifest| manifest.template);
        self.templates.is_current(template, taken.ok().as_deref())
    }

    fn remove(&self, id: &str) -> Result<(), EngineError> {
        self.store.remove(id).map_err(EngineError::failed)
    }

    fn prefetch(&self, id: &str) -> Result<(), EngineError> {
        self.store.prefetch(id).map_err(EngineError::failed)
    }

    fn find_damage(&self, id: &str) -> Option<String> {
        self.store.find_damage(id)
    }

    fn verify(&self, _id: &str) -> Result<Vec<VerifiedSnapshot>, EngineError> {
        Err(EngineError::Unsupported {
            engine: GVISOR,
            what: "compare snapshots with checksums",
            instead: Some("the engine microvm"),
        })
    }

    fn parts(&self, id: &str) -> Result<SnapshotParts, EngineError> {
        parts::parts(&self.store, id)
    }

    async fn check_import(&self, import: &SnapshotImport) -> Result<(), EngineError> {
        self.can_restore(import).await.map(drop)
    }

    async fn import(
        &self,
        import: &SnapshotImport,
        files: ImportedFiles,
        existing: ExistingSnapshot,
    ) -> Result<(), EngineError> {
        self.import_files(import, files, existing).await
    }
}
