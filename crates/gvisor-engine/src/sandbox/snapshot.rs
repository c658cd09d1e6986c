//! Snapshots of a running gVisor sandbox: the helper program writes a checkpoint, and this module
//! publishes it.
//!
//! A *draft* is the directory of a snapshot that is not published yet.

use super::{Sandbox, elapsed_us};
use crate::error::GvisorError;
use crate::helper::HelperRequest;
use crate::snapshot_store::{GvisorManifest, SnapshotStore};
use jiffy_engine_api::now_ms;
use std::fs;
use std::path::Path;
use std::time::Instant;

impl Sandbox {
    /// Takes snapshot `id`. The sandbox is paused while the snapshot is written. If `resume` is
    /// true, the sandbox then continues, and streams into it survive. If `resume` is false, the
    /// sandbox is removed after the snapshot is published. A snapshot larger than `max_bytes` is
    /// rejected. Returns the duration of the pause and the total duration, in microseconds.
    pub async fn snapshot(
        &self,
        store: &SnapshotStore,
        id: &str,
        resume: bool,
        max_bytes: Option<u64>,
    ) -> Result<(u64, u64), GvisorError> {
        let _lock = self.snapshot_lock.lock().await;
        let started_at = Instant::now();
        // Check the id before the sandbox is paused.
        store.expect_free(id)?;
        let draft = store.draft()?;
        let taken = self
            .write_snapshot(store, &draft, id, resume, max_bytes)
            .await;
        if taken.is_err() {
            // Ignore the error: `SnapshotStore::walk` of a later process removes the draft.
            let _ = fs::remove_dir_all(&draft);
        }
        Ok((taken?, elapsed_us(started_at)))
    }

    /// Writes the snapshot into the directory `draft` and publishes it. Returns the duration of the
    /// pause, in microseconds. With `resume`, the sandbox continues to run.
    async fn write_snapshot(
        &self,
        store: &SnapshotStore,
        draft: &Path,
        id: &str,
        resume: bool,
        max_bytes: Option<u64>,
    ) -> Result<u64, GvisorError> {
        let spec = &self.body.spec;
        let manifest = GvisorManifest {
            version: self.body.helper.version().await?,
            template: spec.template.clone(),
            size: spec.size,
            net: spec.namespace.is_some(),
            base: spec.base.to_string_lossy().into_owned(),
            ..GvisorManifest::new(id, now_ms())
        };
        let image = draft.to_owned();
        let reply = self
            .body
            .request(&HelperRequest::Checkpoint { image, resume })
            .await?;
        let published = match (SnapshotStore::size_of(draft), max_bytes) {
            // The size of a checkpoint is only known after it is written.
            (needed, Some(most)) if needed > most => Err(GvisorError::TooLarge { needed, most }),
            _ => store.publish(draft, &manifest),
        };
        match (published, resume) {
            (Err(e), false) => {
                // Resume the paused sandbox: without the snapshot, it is the only copy of the
                // state.
                self.body.request(&HelperRequest::Resume).await?;
                return Err(e);
            }
            (published, _) => published?,
        }
        if !resume {
            // The sandbox is removed after the publication: until then, it has the only copy of its
            // state.
            self.body.remove().await;
        }
        Ok(reply.stopped_us)
    }
}
