//! Shares of the host that one owner's sandboxes and snapshots have.

use super::{OperationError, SandboxIndex, Sandboxes, SandboxesInner};
use crate::quota::{OwnerQuota, QuotaAmount, QuotaPermit, QuotaRequest};
use crate::sandbox::Sandbox;
use crate::snapshot::Snapshot;
use jiffy_api_types::{SandboxState, SnapshotPurpose};
use jiffy_engine_api::{SandboxSize, steps};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Quotas of owners, and how much of them is used.
#[derive(Clone, Copy)]
pub struct OwnerBudgets<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Quotas of owners, and how much of them is used.
    pub fn budgets(&self) -> OwnerBudgets<'_> {
        OwnerBudgets(&self.0)
    }
}

/// Least bytes of a budget with which a snapshot is begun: what state and indexes of a small guest
/// take.
const SNAPSHOT_FLOOR: u64 = 1 << 20;
/// Bytes that state and indexes of a snapshot take at most, beside one in 512 of what they are
/// about.
const SNAPSHOT_OVERHEAD: u64 = 16 << 20;
/// Sandboxes and snapshots of one owner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerUsage {
    /// Running sandboxes.
    pub sandboxes: u64,
    /// Their virtual CPUs.
    pub vcpus: u64,
    /// Their memory, in MiB.
    pub memory_mib: u64,
    /// Sandboxes that are paused, or will be at their timeout.
    pub paused: u64,
    /// Snapshots that were asked for.
    pub snapshots: u64,
    /// Bytes of what sandboxes sleep in, or were paused or forked in and still run from.
    pub paused_bytes: u64,
    /// Bytes of snapshots that were asked for.
    pub snapshot_bytes: u64,
    /// Bytes of build steps.
    pub step_bytes: u64,
}

/// Most bytes that a snapshot of a guest of `size` can have.
fn most_bytes(size: SandboxSize) -> u64 {
    let guest = u64::from(size.memory_mib).saturating_add(size.disk_mib) << 20;
    guest + guest / 512 + SNAPSHOT_OVERHEAD
}

impl OwnerBudgets<'_> {
    /// Limits what is made for owners by their budgets from now on.
    pub fn limit(self, quota: Arc<dyn OwnerQuota>) {
        *self.0.quota.lock() = Some(quota);
    }

    pub(super) fn quota(self) -> Option<Arc<dyn OwnerQuota>> {
        self.0.quota.lock().clone()
    }

    /// Returns what sandboxes and snapshots of `owner` take. It is counted from its records
    /// themselves, a few microseconds for a thousand of them, so that it cannot drift from what
    /// there is. Those of others are not looked at.
    pub fn usage(self, owner: &str) -> OwnerUsage {
        let mut used = OwnerUsage::default();
        {
            let snapshots = self.0.catalog.read();
            for snapshot in snapshots.owned_by(owner) {
                used.snapshots += u64::from(snapshot.is_asked_for());
                let bytes = match snapshot.purpose {
                    SnapshotPurpose::Asked => &mut used.snapshot_bytes,
                    SnapshotPurpose::Step => &mut used.step_bytes,
                    SnapshotPurpose::Pause | SnapshotPurpose::Fork | SnapshotPurpose::Template => {
                        &mut used.paused_bytes
                    }
                };
                *bytes = bytes.saturating_add(snapshot.bytes);
            }
        }
        let ids = SandboxIndex(self.0).of_owner(owner);
        let entries = self.0.entries.lock();
        for entry in ids.iter().filter_map(|id| entries.get(id.as_str())) {
            entry.with_record(|record| {
                used.paused += u64::from(record.has_paused_place());
                if record.state == SandboxState::Running {
                    used.sandboxes += 1;
                    used.vcpus += u64::from(record.size.vcpus);
                    used.memory_mib += u64::from(record.size.memory_mib);
                }
            });
        }
        used
    }

    /// Room for `amount` in the budget of `owner`.
    pub(super) async fn reserve(
        self,
        owner: Option<&str>,
        request: QuotaRequest,
    ) -> Result<QuotaPermit, OperationError> {
        match (owner, self.quota()) {
            (Some(owner), Some(quota)) => Ok(quota.reserve(owner, request).await?),
            _ => Ok(QuotaPermit::unlimited()),
        }
    }

    /// Room for the snapshot `draft` of `sandbox`, which pauses it if that is its purpose.
    pub(super) async fn reserve_snapshot(
        self,
        draft: &Snapshot,
        sandbox: &Sandbox,
    ) -> Result<QuotaPermit, OperationError> {
        let _step = steps::begin("quota");
        let pauses = draft.purpose == SnapshotPurpose::Pause && !sandbox.has_paused_place();
        let amount = QuotaAmount {
            paused: u64::from(pauses),
            snapshots: u64::from(draft.is_asked_for()),
            disk_bytes: most_bytes(draft.size),
            ..QuotaAmount::default()
        };
        let request = QuotaRequest {
            amount,
            disk_floor: Some(SNAPSHOT_FLOOR),
        };
        self.reserve(draft.owner.as_deref(), request).await
    }
}
