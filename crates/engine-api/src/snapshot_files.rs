//! Files of an engine's snapshots.

use crate::{
    EngineError, ExistingSnapshot, FoldPace, FoldPreparation, FoldResult, ImportedFiles,
    LineageLimits, SnapshotImport, SnapshotParts, VerifiedSnapshot,
};
use async_trait::async_trait;

/// Ids of snapshots, read from the disk lazily.
pub type SnapshotWalk = Box<dyn Iterator<Item = Result<String, EngineError>> + Send>;

/// Files of an engine's snapshots. The defaults suit an engine whose snapshots do not depend on
/// other snapshots and always have all of their memory.
#[async_trait]
pub trait SnapshotFiles: Send + Sync {
    /// Returns the ids of complete snapshots on this host, read from disk.
    fn ids(&self) -> Result<Vec<String>, EngineError>;

    /// Returns the same ids lazily and in no order. Removes incomplete snapshots of dead processes.
    fn walk(&self) -> Result<SnapshotWalk, EngineError> {
        Ok(Box::new(self.ids()?.into_iter().map(Ok)))
    }

    /// Returns the disk space of snapshot `id` in bytes, without its ancestors. Merges and folds
    /// change it.
    fn size(&self, _id: &str) -> Option<u64> {
        None
    }

    /// Returns true if new sandboxes of `template` may still start from its snapshot `id`, and
    /// false if the template has changed or was removed.
    fn is_current(&self, _template: &str, _id: &str) -> bool {
        true
    }

    /// Removes a snapshot's files; a missing snapshot is not an error. Blocks.
    fn remove(&self, id: &str) -> Result<(), EngineError>;

    /// Removes the files of a captured snapshot whose guest is lost. Blocks.
    fn discard_captured(&self, _id: &str) {}

    /// Removes incomplete files of the engine that no process will complete, other than snapshots.
    /// Returns their number. Called soon after the start and every minute.
    fn gc(&self) -> Result<usize, EngineError> {
        Ok(0)
    }

    /// Reads the working set of snapshot `id` into memory. Blocks.
    fn prefetch(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Checks for damage of snapshot `id` without reading its layers: files that are missing or
    /// differ from what was written. Ancestors are not checked. Returns the first damage found.
    /// Blocks.
    fn find_damage(&self, _id: &str) -> Option<String> {
        None
    }

    /// Writes the checksums of snapshot `id` and its ancestors, once; the snapshot may be removed
    /// meanwhile. Blocks.
    fn write_checksums(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Compares snapshot `id` and its ancestors with their checksums, oldest first. Blocks.
    fn verify(&self, id: &str) -> Result<Vec<VerifiedSnapshot>, EngineError>;

    /// Returns true if snapshot `id` needs no files of its ancestors. An engine may merge a
    /// snapshot by itself to keep restores fast. Called under a lock: reads at most one small file.
    fn is_independent(&self, _id: &str) -> bool {
        true
    }

    /// Returns true if the files of snapshot `id` depend on those of `ancestor`. Called under a
    /// lock: reads at most one small file if `ancestor` is the parent.
    fn depends_on(&self, id: &str, _ancestor: &str) -> bool {
        !self.is_independent(id)
    }

    /// Returns the snapshot on whose files those of `id` depend directly, if any. Reads one small
    /// file.
    fn parent(&self, _id: &str) -> Option<String> {
        None
    }

    /// Returns an upper bound of the bytes by which snapshot `id` grows when it is merged with its
    /// lineage, which keeps restores fast. `None` if its lineage is within `limits`.
    fn merge_growth(&self, _id: &str, _limits: LineageLimits) -> Option<u64> {
        None
    }

    /// Merges snapshot `id` with its ancestors if its lineage exceeds `limits`.
    async fn merge(&self, _id: &str, _limits: LineageLimits) -> Result<(), EngineError> {
        Ok(())
    }

    /// Prepares the fold of [`Self::parent`] of snapshot `id` into the snapshot, so that the parent
    /// can be removed. Refused if the parent has other children, or if the copy would be larger
    /// than both the snapshot and `max_copy` bytes. Guests, restores and uploads of both continue.
    /// Blocks.
    fn prepare_fold(&self, _id: &str, _max_copy: u64, _pace: &mut FoldPace<'_>) -> FoldResult {
        Ok(FoldPreparation::Refused)
    }

    /// Opens the files of snapshot `id` together with the parts of them that its ancestors have.
    /// Blocks.
    fn parts(&self, id: &str) -> Result<SnapshotParts, EngineError>;

    /// Checks that this host can restore a snapshot that another host made, before its layers are
    /// fetched ([`EngineError::Incompatible`]).
    async fn check_import(&self, import: &SnapshotImport) -> Result<(), EngineError>;

    /// Stores a snapshot that another host made and whose parent is on this host. Afterwards it is
    /// either complete or does not exist.
    async fn import(
        &self,
        import: &SnapshotImport,
        files: ImportedFiles,
        existing: ExistingSnapshot,
    ) -> Result<(), EngineError>;

    /// Returns true if a guest can be restored from a snapshot whose memory is not complete
    /// ([`ImportedFile::missing`](crate::ImportedFile::missing)).
    fn restores_lazily(&self) -> bool {
        false
    }

    /// Requests that all memory of snapshot `id` and its ancestors is fetched while a guest runs
    /// from it.
    fn request_memory(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Returns the source of the memory that snapshot `id` lacks, as the importer named it
    /// ([`ImportedFile::missing`](crate::ImportedFile::missing)). `None` if the memory is complete.
    /// Ancestors are not checked. Blocks.
    fn missing_memory(&self, _id: &str) -> Result<Option<String>, EngineError> {
        Ok(None)
    }

    /// Fetches the memory that snapshot `id` lacks, without that of its ancestors.
    async fn complete_memory(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }
}
