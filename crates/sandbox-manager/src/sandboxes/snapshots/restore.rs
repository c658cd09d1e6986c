//! Restores guests from snapshots. Damaged files are fetched again from the store, if possible.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.
//!
//! The *identity* of a guest consists of its id, host name, entropy and clock.

use super::Snapshots;
use crate::operation_error::OperationError;
use crate::sandboxes::create::GuestOrigin;
use jiffy_api_types::BootMode;
use jiffy_engine_api::{SandboxIdentity, UnassignedGuest};

impl Snapshots<'_> {
    async fn restore(
        self,
        id: &str,
        identity: &SandboxIdentity,
    ) -> Result<Box<dyn UnassignedGuest>, OperationError> {
        // A restore reads each ancestor, so a long lineage is merged first.
        self.shorten_lineage(id).await?;
        let failed = || OperationError::engine(format!("restore snapshot {id}"));
        let engine = self.0.snapshot_engines.engine_of(id).map_err(failed())?;
        engine.restore(id, Some(identity)).await.map_err(failed())
    }

    /// Restores a guest from snapshot `id`. The guest may take `identity` while it starts, but the
    /// caller must still assign the same identity before the guest is used.
    pub(in crate::sandboxes) async fn origin(
        self,
        id: &str,
        mode: BootMode,
        identity: &SandboxIdentity,
    ) -> Result<GuestOrigin, OperationError> {
        let unassigned = match self.restore(id, identity).await {
            // Damaged files are fetched again, once.
            Err(e) => {
                Box::pin(self.repair_after(id, e)).await?;
                self.restore(id, identity).await?
            }
            Ok(unassigned) => unassigned,
        };
        Ok(GuestOrigin {
            unassigned,
            mode,
            snapshot: Some(id.to_owned()),
            restore_reason: None,
            claim: None,
        })
    }
}
