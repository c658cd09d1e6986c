//! Files of an engine's snapshots.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. A *layer* is the
//! part of a memory or disk that one snapshot stores: the content that differs from its ancestors.
//!
//! A merge combines a snapshot with its ancestors, to keep the lineage short. A fold copies the
//! content that only a removed snapshot stores into its child, so that the files of the removed
//! snapshot can be deleted. A captured snapshot is one whose memory is still held by its guest and
//! is written in the background.

use crate::{
    EngineError, ExistingSnapshot, FoldPace, FoldPreparation, FoldResult, ImportedFiles,
    LineageLimits, SnapshotImport, SnapshotParts, VerifiedSnapshot,
};
use async_trait::async_trait;

/// Lazy iterator over the ids of snapshots on disk.
pub type SnapshotWalk = Box<dyn Iterator<Item = Result<String, EngineError>> + Send>;

/// Files of an engine's snapshots. The default methods suit an engine whose snapshots do not depend
/// on other snapshots and always have complete memory.
#[async_trait]
pub trait SnapshotFiles: Send + Sync {
    /// Returns the ids of complete snapshots on this host. Reads the disk.
    fn ids(&self) -> Result<Vec<String>, EngineError>;

    /// Returns the ids of [`Self::ids`] lazily, in no particular order. Removes incomplete
    /// snapshots of processes that exited.
    fn walk(&self) -> Result<SnapshotWalk, EngineError> {
        Ok(Box::new(self.ids()?.into_iter().map(Ok)))
    }

    /// Returns the disk space of snapshot `id` in bytes, without its ancestors. Merges and folds
    /// change the value.
    fn size(&self, _id: &str) -> Option<u64> {
        None
    }

    /// Returns whether new sandboxes of `template` may start from its snapshot `id`. Returns
    /// `false` if the template has changed or was removed.
    fn is_current(&self, _template: &str, _id: &str) -> bool {
        true
    }

    /// Removes a snapshot's files. A missing snapshot is not an error. Blocks.
    fn remove(&self, id: &str) -> Result<(), EngineError>;

    /// Removes the files of a captured snapshot after the guest that holds its memory is lost.
    /// Blocks.
    fn discard_captured(&self, _id: &str) {}

    /// Removes incomplete files that no process will complete, and returns their number. Incomplete
    /// snapshots are removed by [`Self::walk`]. Called soon after the start and then every minute.
    fn gc(&self) -> Result<usize, EngineError> {
        Ok(0)
    }

    /// Reads the working set of snapshot `id` into memory. Blocks.
    fn prefetch(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Checks snapshot `id` for missing files and files of unexpected size, without reading its
    /// layers. Ancestors are not checked. Returns the first damage that is detected. Blocks.
    fn find_damage(&self, _id: &str) -> Option<String> {
        None
    }

    /// Writes the checksums of snapshot `id` and its ancestors if they do not exist. The snapshot
    /// may be removed meanwhile. Blocks.
    fn write_checksums(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Compares snapshot `id` and its ancestors with their checksums, oldest first. Blocks.
    fn verify(&self, id: &str) -> Result<Vec<VerifiedSnapshot>, EngineError>;

    /// Returns whether snapshot `id` needs no files of its ancestors. This may change at any time
    /// because an engine may merge a snapshot. Called under a lock: reads at most one small file.
    fn is_independent(&self, _id: &str) -> bool {
        true
    }

    /// Returns whether the files of snapshot `id` depend on the files of `ancestor`. Called under a
    /// lock: reads at most one small file if `ancestor` is the parent.
    fn depends_on(&self, id: &str, _ancestor: &str) -> bool {
        !self.is_independent(id)
    }

    /// Returns the snapshot on whose files the files of `id` depend directly. `None` if `id` is
    /// independent. Reads one small file.
    fn parent(&self, _id: &str) -> Option<String> {
        None
    }

    /// Returns an upper bound for the bytes by which a merge increases snapshot `id`. `None` if its
    /// lineage is within `limits` and needs no merge.
    fn merge_growth(&self, _id: &str, _limits: LineageLimits) -> Option<u64> {
        None
    }

    /// Merges snapshot `id` with its ancestors if its lineage exceeds `limits`.
    async fn merge(&self, _id: &str, _limits: LineageLimits) -> Result<(), EngineError> {
        Ok(())
    }

    /// Prepares the fold of the parent ([`Self::parent`]) of snapshot `id`: copies the content that
    /// only the parent stores into the files of `id`, so that the parent can be removed. Rejected
    /// if the parent has other children. Also rejected if the copy would be larger than `max_copy`
    /// bytes and also larger than the content that `id` stores itself. Guests, restores and uploads
    /// of both snapshots can continue. Blocks.
    fn prepare_fold(&self, _id: &str, _max_copy: u64, _pace: &mut FoldPace<'_>) -> FoldResult {
        Ok(FoldPreparation::Refused)
    }

    /// Opens the files of snapshot `id`, with the ranges that its ancestors contain. Blocks.
    fn parts(&self, id: &str) -> Result<SnapshotParts, EngineError>;

    /// Checks that this host can restore a snapshot from another host, before its layers are
    /// fetched ([`EngineError::Incompatible`]).
    async fn check_import(&self, import: &SnapshotImport) -> Result<(), EngineError>;

    /// Stores a snapshot from another host. Its parent must exist on this host. On return, the
    /// snapshot is either complete or does not exist.
    async fn import(
        &self,
        import: &SnapshotImport,
        files: ImportedFiles,
        existing: ExistingSnapshot,
    ) -> Result<(), EngineError>;

    /// Returns whether guests can be restored from a snapshot with incomplete memory
    /// ([`ImportedFile::missing`](crate::ImportedFile::missing)).
    fn restores_lazily(&self) -> bool {
        false
    }

    /// Requests that all memory of snapshot `id` and its ancestors is fetched while a guest runs
    /// from it.
    fn request_memory(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Returns the source of the memory that snapshot `id` lacks, as the importer specified it
    /// ([`ImportedFile::missing`](crate::ImportedFile::missing)). `None` if the memory is complete.
    /// Ancestors are not checked. Blocks.
    fn missing_memory(&self, _id: &str) -> Result<Option<String>, EngineError> {
        Ok(None)
    }

    /// Fetches the memory that snapshot `id` lacks. Ancestors are not completed.
    async fn complete_memory(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }
}
