//! Limits the length of lineages by merging snapshots with their ancestors: a restore reads the
//! files of each ancestor.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.

use crate::quota::{QuotaAmount, QuotaPermit, QuotaRequest};
use crate::sandboxes::{OperationError, OwnerBudgets, Snapshots};
use jiffy_engine_api::LineageLimits;
use std::sync::Arc;
use std::time::Duration;

/// Limits for a snapshot that is about to be restored, while a client waits. A lineage longer than
/// `cheap` is merged if this copies little data, and a lineage longer than `longest` always.
const LIMITS: LineageLimits = LineageLimits {
    cheap: 12,
    longest: 16,
};
/// Limits for the snapshot of a paused sandbox. They are lower, since no client waits for the
/// merge.
const PAUSED_LIMITS: LineageLimits = LineageLimits {
    cheap: 3,
    longest: 10,
};
/// Delay of the merge after a pause, in case the sandbox is resumed at once.
const PAUSED_DELAY: Duration = Duration::from_secs(1);

impl Snapshots<'_> {
    /// Merges a snapshot of a long lineage with its nearest ancestors, so that it can be restored
    /// fast. If the quota of its owner does not allow the additional disk space, the snapshot is
    /// not merged.
    pub(in crate::sandboxes) async fn shorten_lineage(
        self,
        id: &str,
    ) -> Result<(), OperationError> {
        self.shorten_to(LIMITS, id).await
    }

    /// Like [`Self::shorten_lineage`] for the snapshot of a paused sandbox. Merges in the
    /// background, some time after the pause, so that the resume need not merge.
    pub(in crate::sandboxes) fn shorten_paused(self, id: &str) {
        if !self.may_exceed(PAUSED_LIMITS, id) {
            return;
        }
        let (inner, id) = (Arc::downgrade(self.0), id.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(PAUSED_DELAY).await;
            let Some(inner) = inner.upgrade() else { return };
            let snapshots = Snapshots(&inner);
            // The snapshot was removed if it has no user any longer, for example after a kill.
            let Ok((snapshot, pin)) = snapshots.pin(&id) else {
                return;
            };
            if let Err(e) = snapshots.shorten_to(PAUSED_LIMITS, &snapshot.id).await {
                tracing::debug!(id, error = %e, "cannot merge a long lineage");
            }
            // The sandbox may have been resumed or removed meanwhile. Its garbage collection
            // skipped the pinned snapshot, so it must be repeated here.
            drop(pin);
            snapshots.0.gc.collect(Some(snapshot.id));
        });
    }

    /// Estimates from the records, without reading the disk, whether the lineage may exceed
    /// `limits`. Snapshots without a record may be part of a lineage too, so half of the limit is
    /// used.
    fn may_exceed(self, limits: LineageLimits, id: &str) -> bool {
        self.lineage(Some(id)).len() > limits.cheap / 2
    }

    /// Merges a snapshot with its ancestors if its lineage exceeds `limits`, and the owner has
    /// quota for the merged files. Does nothing otherwise: a long lineage is only slower.
    async fn shorten_to(self, limits: LineageLimits, id: &str) -> Result<(), OperationError> {
        if !self.may_exceed(limits, id) {
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
        // The host's owner has no quota.
        let permit = match (&owner, OwnerBudgets(self.0).quota()) {
            (Some(owner), Some(quota)) => quota.try_reserve(owner, request),
            _ => Ok(QuotaPermit::unlimited()),
        };
        let _permit = match permit {
            Ok(permit) => permit,
            Err(refusal) => {
                tracing::debug!(id, error = %refusal, "no quota to merge a long lineage");
                return Ok(());
            }
        };
        let merged = files.merge(id, limits).await;
        merged.map_err(OperationError::engine(format!(
            "merge the lineage of snapshot {id}"
        )))?;
        // The merged snapshot contains the content of its former ancestors.
        self.measure(id);
        // The files no longer need the parent, which the record still names: it may have no user.
        let parent = self.0.catalog.read().get(id).and_then(|s| s.parent.clone());
        self.0.gc.collect(parent);
        Ok(())
    }
}
