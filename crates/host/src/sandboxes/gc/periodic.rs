//! Files that belong to nothing, removed while everything runs.

use super::super::{OperationError, Sandboxes};
use super::file_remover::remove_files;
use jiffy_engine::Engine;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl<E: Engine> Sandboxes<E> {
    /// Collects garbage every `every`, for as long as the sandboxes are there.
    pub(in super::super) fn spawn_gc(&self, every: Duration) {
        let inner = std::sync::Arc::downgrade(&self.0);
        tokio::spawn(async move {
            loop {
                let Some(this) = inner.upgrade().map(Sandboxes) else {
                    return;
                };
                let collected = tokio::task::spawn_blocking(move || this.gc()).await;
                match collected {
                    Ok(Ok(0)) => {}
                    Ok(Ok(removed)) => tracing::info!(removed, "removed what belonged to nobody"),
                    Ok(Err(e)) => tracing::warn!("cannot collect garbage: {e}"),
                    Err(e) => tracing::error!("gc was lost: {e}"),
                }
                tokio::time::sleep(every).await;
            }
        });
    }

    /// Removes snapshots that nothing needs, files of snapshots that have no record, and whatever
    /// else was never finished. Returns how many things went. Blocks, and holds no lock while it
    /// looks at the disk.
    pub fn gc(&self) -> Result<usize, OperationError> {
        self.templates().retire_outdated();
        self.snapshots().gc_all();
        let engine = &self.0.engine;
        let failed = || OperationError::engine("look for what belongs to nobody");
        // In this order: a snapshot is held from before its first byte is on the disk until it has
        // its record.
        let mut unknown = engine.snapshots().map_err(failed())?;
        let pins: Vec<String> = self.0.pins.lock().keys().cloned().collect();
        let snapshots = self.0.snapshot_index.lock();
        unknown.retain(|id| snapshots.get(id).is_none() && !pins.contains(id));
        drop(snapshots);
        let found = unknown.len();
        remove_files(engine, &mut unknown);
        let removed = found - unknown.len() + engine.gc().map_err(failed())?;
        let bytes = engine.snapshot_bytes().unwrap_or(0);
        self.0.snapshot_bytes.store(bytes, Ordering::Relaxed);
        Ok(removed)
    }
}
