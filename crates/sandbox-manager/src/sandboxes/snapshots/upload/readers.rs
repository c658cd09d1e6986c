//! Reports the layers that this host still needs to the store, which then retains them. They
//! belong to snapshots whose memory was not fetched completely.

use crate::sandboxes::{OperationError, Sandboxes, SandboxesInner, Snapshots};
use jiffy_engine_api::EngineError;
use jiffy_store::host::{LayerOrigin, RemoteStore};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Maximum time between two reports.
const MAX_REPORT_INTERVAL: Duration = Duration::from_secs(3600);
const RETRY_DELAY: Duration = Duration::from_secs(600);
/// Delay of a report after an event, during which restored guests start.
const EVENT_DELAY: Duration = Duration::from_secs(1);

/// Reports the layers that this host needs to the store, at the start and whenever they may have
/// changed.
pub(super) async fn report_needs(
    inner: Weak<SandboxesInner>,
    remote: Arc<RemoteStore>,
    wake: Arc<tokio::sync::Notify>,
) {
    loop {
        let Some(this) = inner.upgrade().map(Sandboxes) else {
            return;
        };
        let search = tokio::task::spawn_blocking(move || this.snapshots().missing_layers());
        let wait = match search.await {
            Ok(missing) => match remote.keep_readers(&missing).await {
                Ok(()) => MAX_REPORT_INTERVAL,
                Err(e) => {
                    tracing::warn!(error = %e, "cannot report the needed layers to the store");
                    RETRY_DELAY
                }
            },
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
        self.0.uploads.wake_readers.notify_one();
        Ok(())
    }
}

impl Snapshots<'_> {
    /// Returns the source of the memory that snapshot `id` lacks. Blocks.
    pub(super) fn missing_memory(self, id: &str) -> Result<Option<String>, EngineError> {
        self.0.snapshot_engines.files_of(id)?.missing_memory(id)
    }

    /// Returns the layers in the store of which snapshots of this host lack chunks. Blocks.
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
