//! What belongs to nobody, removed while everything runs.

use super::collect::remove_files;
use super::{OperationError, Sandboxes};
use jiffy_engine::Engine;
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl<E: Engine> Sandboxes<E> {
    /// Sweeps now and then every `every`, for as long as the sandboxes are there.
    pub(super) fn keep_clean(&self, every: Duration) {
        let inner = std::sync::Arc::downgrade(&self.0);
        tokio::spawn(async move {
            loop {
                let Some(this) = inner.upgrade().map(Sandboxes) else {
                    return;
                };
                let swept = tokio::task::spawn_blocking(move || this.sweep()).await;
                match swept {
                    Ok(Ok(0)) => {}
                    Ok(Ok(removed)) => tracing::info!(removed, "swept what belonged to nobody"),
                    Ok(Err(e)) => tracing::warn!("cannot sweep: {e}"),
                    Err(e) => tracing::error!("the sweep was lost: {e}"),
                }
                tokio::time::sleep(every).await;
            }
        });
    }

    /// Removes snapshots that the journal does not know and whatever else nobody finished; returns how many things went.
    pub fn sweep(&self) -> Result<usize, OperationError> {
        self.retire_unused();
        let engine = &self.0.engine;
        let failed = || OperationError::engine("look for what belongs to nobody");
        // In this order: a snapshot is in the journal before its first byte is on the disk, and out of it before its last one is gone.
        let on_disk = engine.snapshots_on_disk().map_err(failed())?;
        let known = self.0.journal.snapshots()?;
        let known: HashSet<String> = known.into_iter().map(|s| s.record.id).collect();
        let mut unknown: Vec<String> = on_disk
            .into_iter()
            .filter(|id| !known.contains(id))
            .collect();
        let found = unknown.len();
        remove_files(engine, &mut unknown);
        let removed = found - unknown.len() + engine.sweep().map_err(failed())?;
        let bytes = engine.snapshot_bytes().unwrap_or(0);
        self.0.snapshot_bytes.store(bytes, Ordering::Relaxed);
        Ok(removed)
    }
}
