//! Operations on the snapshot files of microVMs, as the engine interface requires them.

use super::{MicroVmEngine, merging, parts, verification};
use async_trait::async_trait;
use jiffy_engine_api::{
    EngineError, ExistingSnapshot, FoldPace, FoldResult, ImportedFiles, LineageLimits,
    SnapshotFiles, SnapshotImport, SnapshotParts, SnapshotWalk, VerifiedSnapshot,
};
use jiffy_snapshot::SnapshotError;
use std::time::SystemTime;

#[async_trait]
impl SnapshotFiles for MicroVmEngine {
    fn ids(&self) -> Result<Vec<String>, EngineError> {
        self.shared.store.ids().map_err(EngineError::failed)
    }

    fn walk(&self) -> Result<SnapshotWalk, EngineError> {
        let walk = self
            .shared
            .store
            .walk(SystemTime::now())
            .map_err(EngineError::failed)?;
        Ok(Box::new(walk.map(|id| id.map_err(EngineError::failed))))
    }

    fn size(&self, id: &str) -> Option<u64> {
        self.shared.store.get(id).and_then(|s| s.bytes()).ok()
    }

    fn is_current(&self, template: &str, id: &str) -> bool {
        let taken = self.shared.store.manifest(id).map(|taken| taken.template);
        self.shared
            .templates
            .is_current(template, taken.ok().as_deref())
    }

    fn remove(&self, id: &str) -> Result<(), EngineError> {
        match self.shared.store.remove(id) {
            // Another call may have removed the snapshot.
            Ok(()) | Err(SnapshotError::Missing(_)) => Ok(()),
            Err(e) => Err(EngineError::failed(e)),
        }
    }

    fn discard_captured(&self, id: &str) {
        if let Err(e) = self.shared.store.discard_captured(id) {
            tracing::warn!(id, error = %e, "cannot remove the files of a captured snapshot");
        }
    }

    fn gc(&self) -> Result<usize, EngineError> {
        self.shared.templates.drop_replaced();
        // Removes the control groups of VMMs that have exited.
        self.shared.host().programs().vmm.gc();
        let removed = self.data_dir_gc.run(SystemTime::now());
        for path in &removed {
            tracing::info!(path = %path.display(), "removed an unused file");
        }
        Ok(removed.len())
    }

    fn prefetch(&self, id: &str) -> Result<(), EngineError> {
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        // Chunks that are not on this host cannot be read ahead.
        if !lineage.is_complete() {
            return Ok(());
        }
        lineage.prefetch().map(drop).map_err(EngineError::failed)
    }

    fn find_damage(&self, id: &str) -> Option<String> {
        self.shared
            .store
            .find_damage(id)
            .map(|damage| damage.to_string())
    }

    fn write_checksums(&self, id: &str) -> Result<(), EngineError> {
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        // The missing chunks have no content to compute a checksum of.
        if !lineage.is_complete() {
            return Ok(());
        }
        let mut results = lineage
            .snapshots()
            .iter()
            .map(|snapshot| snapshot.write_checksums());
        results.try_for_each(|result| result.map_err(EngineError::failed))
    }

    fn verify(&self, id: &str) -> Result<Vec<VerifiedSnapshot>, EngineError> {
        verification::verify(&self.shared.store, id)
    }

    fn is_independent(&self, id: &str) -> bool {
        self.shared.store.is_independent(id).unwrap_or(false)
    }

    fn depends_on(&self, id: &str, ancestor: &str) -> bool {
        merging::depends_on(&self.shared.store, id, ancestor)
    }

    fn parent(&self, id: &str) -> Option<String> {
        self.shared.store.manifest(id).ok()?.parent
    }

    fn merge_growth(&self, id: &str, limits: LineageLimits) -> Option<u64> {
        let lineage = self.shared.store.lineage(id).ok()?;
        merging::growth(&lineage, merging::oldest(&lineage, limits)?)
    }

    async fn merge(&self, id: &str, limits: LineageLimits) -> Result<(), EngineError> {
        let _guard = self.merges.lock_for_merge().await;
        // Another call may have merged the snapshot while this call waited for the lock.
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        let Some(oldest) = merging::oldest(&lineage, limits) else {
            return Ok(());
        };
        // The merge copies memory of the ancestors, so all missing memory is fetched first. Boxed
        // because the future is large and rarely used.
        Box::pin(self.complete(id)).await?;
        let (store, owned) = (self.shared.store.clone(), id.to_owned());
        let merged = tokio::task::spawn_blocking(move || store.merge(&owned, oldest))
            .await
            .map_err(EngineError::failed)?;
        merged.map(drop).map_err(EngineError::failed)
    }

    fn prepare_fold(&self, id: &str, max_copy: u64, pace: &mut FoldPace<'_>) -> FoldResult {
        self.merges
            .prepare_fold(&self.shared.store, id, max_copy, pace)
    }

    fn parts(&self, id: &str) -> Result<SnapshotParts, EngineError> {
        parts::parts(&self.shared.store, id)
    }

    async fn check_import(&self, import: &SnapshotImport) -> Result<(), EngineError> {
        self.can_restore(import).await
    }

    async fn import(
        &self,
        import: &SnapshotImport,
        files: ImportedFiles,
        existing: ExistingSnapshot,
    ) -> Result<(), EngineError> {
        self.import_files(import, files, existing).await
    }

    fn restores_lazily(&self) -> bool {
        self.restores_lazily_here()
    }

    fn request_memory(&self, id: &str) -> Result<(), EngineError> {
        self.request_all_memory(id)
    }

    fn missing_memory(&self, id: &str) -> Result<Option<String>, EngineError> {
        self.missing_of(id)
    }

    async fn complete_memory(&self, id: &str) -> Result<(), EngineError> {
        // The future is boxed, because it is large and rarely used.
        Box::pin(self.complete_one(id)).await
    }
}
