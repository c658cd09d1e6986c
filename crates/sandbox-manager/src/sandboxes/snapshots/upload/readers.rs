//! Reports to the store which of its layers this host still needs, so that the store retains them.
//! The host needs them for snapshots whose memory was not fetched completely.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors.

use crate::sandboxes::{OperationError, Sandboxes, SandboxesInner, Snapshots};
use jiffy_engine_api::EngineError;
use jiffy_store::host::{LayerOrigin, RemoteStore};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Maximum time between two reports.
const MAX_REPORT_INTERVAL: Duration = Duration::from_secs(3600);
/// Delay after a failed report.
const RETRY_DELAY: Duration = Duration::from_secs(600);
/// Delay of a report after a notification, so that guests of snapshots that were just fetched start
/// first.
const EVENT_DELAY: Duration = Duration::from_secs(1);

/// Reports the needed layers at the start, and whenever they may have changed.
pub(super) async fn report_needs(
    inner: Weak<SandboxesInner>,
    remote: Arc<RemoteStore>,
    wake: Arc<tokio::sync::Notify>,
) {
    loop {
        let Some(this) = inner.upgrade().map(Sandboxes) else {
            return;
        };
        // The task must not keep the sandboxes alive while it waits.
        let search = tokio::task::spawn_blocking(move || this.snapshots().missing_layers());
        let wait = match search.await {
            Ok(missing) => match remote.keep_readers(&missing).await {
                Ok(()) => MAX_REPORT_INTERVAL,
                Err(e) => {
                    tracing::warn!(error = %e, "cannot report the needed layers to the store");
                    RETRY_DELAY
                }
            },
            // The task was aborted: the runtime is shutting down.
            Err(_) => return,
        };
        if tokio::time::timeout(wait, wake.notified()).await.is_ok() {
            tokio::time::sleep(EVENT_DELAY).await;
        }
    }
}

impl Sandboxes {
    /// Fetches the memory that snapshot `id` lacks, so that the snapshot can be uploaded again.
    pub(super) async fn complete_memory(&self, id: &str) -> Result<(), OperationError> {
        tracing::info!(
            id,
            "fetching the memory of a snapshot that must be uploaded again"
        );
        let failed = || OperationError::engine("fetch its memory");
        let files = self.0.snapshot_engines.files_of(id).map_err(failed())?;
        files.complete_memory(id).await.map_err(failed())?;
        // The host no longer needs the layers of this snapshot.
        self.0.uploads.wake_readers.notify_one();
        Ok(())
    }
}

impl Snapshots<'_> {
    /// Returns the source of the memory that snapshot `id` lacks. Blocks.
    pub(super) fn missing_memory(self, id: &str) -> Result<Option<String>, EngineError> {
        self.0.snapshot_engines.files_of(id)?.missing_memory(id)
    }

    /// Returns the layers in the store from which snapshots of this host still lack chunks. Blocks.
    fn missing_layers(self) -> Vec<LayerOrigin> {
        let ids = self.ids_of(|_| true).into_iter();
        let origin = |id: String| match self.missing_memory(&id) {
            Ok(None) => None,
            Ok(Some(origin)) => LayerOrigin::decode(&origin).ok(),
            Err(e) => {
                tracing::debug!(id, error = %e, "cannot determine the missing memory of a snapshot");
                None
            }
        };
        ids.filter_map(origin).collect()
    }
}
