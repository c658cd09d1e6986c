//! Lengths of lineages: a restore reads each of the snapshots below it.

use crate::quota::{QuotaAmount, QuotaPermit, QuotaRequest};
use crate::sandboxes::{OperationError, OwnerBudgets, Snapshots};
use jiffy_engine_api::LineageLimits;
use std::sync::Arc;
use std::time::Duration;

/// Limits for a snapshot that is restored.
const LIMITS: LineageLimits = LineageLimits {
    cheap: 12,
    longest: 16,
};
/// Limits for one that a sandbox sleeps in.
const ASLEEP_LIMITS: LineageLimits = LineageLimits {
    cheap: 3,
    longest: 10,
};
/// Time for the sandbox to be woken again before its snapshot is merged.
const ASLEEP_DELAY: Duration = Duration::from_secs(1);

impl Snapshots<'_> {
    /// Merges a snapshot with the nearest of a long lineage, so that it is restored fast, if its
    /// owner's budget has room for how much larger that makes it. Without room it is restored as it
    /// is.
    pub(in crate::sandboxes) async fn shorten_lineage(
        self,
        id: &str,
    ) -> Result<(), OperationError> {
        self.shorten_to(LIMITS, id).await
    }

    /// Does so for the snapshot that a sandbox sleeps in before a wake would have to, some time
    /// after the pause.
    pub(in crate::sandboxes) fn shorten_asleep(self, id: &str) {
        if !self.may_be_longer(ASLEEP_LIMITS, id) {
            return;
        }
        let (inner, id) = (Arc::downgrade(self.0), id.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(ASLEEP_DELAY).await;
            let Some(inner) = inner.upgrade() else { return };
            let snapshots = Snapshots(&inner);
            // Gone if the sandbox was woken.
            let Ok((snapshot, pin)) = snapshots.pin(&id) else {
                return;
            };
            if let Err(e) = snapshots.shorten_to(ASLEEP_LIMITS, &snapshot.id).await {
                tracing::debug!(id, "its lineage stays long: {e}");
            }
            // The sandbox may have been woken or removed meanwhile, and left it to whoever held it.
            drop(pin);
            snapshots.0.gc.collect(Some(snapshot.id));
        });
    }

    /// False where the disk need not be asked: snapshots without a record are few in a lineage.
    fn may_be_longer(self, limits: LineageLimits, id: &str) -> bool {
        self.lineage(Some(id)).len() > limits.cheap / 2
    }

    async fn shorten_to(self, limits: LineageLimits, id: &str) -> Result<(), OperationError> {
        if !self.may_be_longer(limits, id) {
            return Ok(());
        }
        let Ok(files) = self.0.snapshot_engines.files_of(id) else {
            return Ok(());
        };
        let Some(growth) = files.merge_growth(id, limits) else {
            return Ok(());
        };
        let owner = self.0.catalog.read().get(id).and_then(|s| s.owner.clone());
        let request = QuotaRequest {
            amount: QuotaAmount {
                disk_bytes: growth,
                ..QuotaAmount::default()
            },
            disk_floor: None,
        };
        let permit = match (&owner, OwnerBudgets(self.0).quota()) {
            (Some(owner), Some(quota)) => quota.try_reserve(owner, request),
            _ => Ok(QuotaPermit::unlimited()),
        };
        let _permit = match permit {
            Ok(permit) => permit,
            Err(refusal) => {
                tracing::debug!(id, "its lineage stays long: {refusal}");
                return Ok(());
            }
        };
        let merged = files.merge(id, limits).await;
        merged.map_err(OperationError::engine(format!("restore snapshot {id}")))?;
        self.measure(id);
        // The snapshot below may have no owner now.
        let parent = self.0.catalog.read().get(id).and_then(|s| s.parent.clone());
        self.0.gc.collect(parent);
        Ok(())
    }
}
