//! Garbage collection: removes unneeded snapshots and orphaned files.
//!
//! Records are removed at once, in memory and in the journal. Files are removed later, by a thread
//! ([`file_remover`]). A daemon that exits may leave files. The next daemon removes them
//! ([`periodic`]) while it serves clients.

mod file_remover;
mod periodic;
mod unneeded;

use super::entry_indexes::EntryIndexes;
use super::snapshot_catalog::SnapshotCatalog;
use super::snapshot_engine::{SnapshotEngines, SnapshotOnDisk};
use super::snapshots::snapshot_fold::SnapshotFolder;
use super::snapshots::upload::Uploads;
use crate::journal::Journal;
use file_remover::FileRemover;
use std::sync::Arc;

/// Components that the garbage collector uses.
pub(super) struct GcParts {
    pub catalog: Arc<SnapshotCatalog>,
    pub engines: Arc<SnapshotEngines>,
    pub journal: Arc<Journal>,
    /// Contains the sandboxes that use each snapshot.
    pub indexes: Arc<EntryIndexes>,
    /// Reclaims the disk space of removed snapshots on which other snapshots depend.
    pub folder: Arc<SnapshotFolder>,
    /// Removes copies from the store.
    pub uploads: Arc<Uploads>,
}

/// Removes snapshots that no sandbox, snapshot or operation needs, and orphaned files of snapshots.
pub(super) struct GarbageCollector {
    parts: GcParts,
    file_remover: FileRemover,
}

impl GarbageCollector {
    /// Creates a collector, and starts the thread that removes files.
    pub fn new(parts: GcParts) -> Self {
        let file_remover = FileRemover::start(Arc::downgrade(&parts.engines));
        Self {
            parts,
            file_remover,
        }
    }

    /// Waits until all queued files are removed. Waits at most two seconds for files that are in
    /// use.
    pub async fn removed_files(&self) {
        self.file_remover.done().await;
    }

    /// Queues the removal of the files of snapshots that have no record.
    pub fn remove_files(&self, snapshots: Vec<SnapshotOnDisk>) {
        if !snapshots.is_empty() {
            self.file_remover.remove(snapshots);
        }
    }
}
