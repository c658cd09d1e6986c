//! [`OwnerBudgets`]: usage of each owner's sandboxes and snapshots, and reservations in the owner's
//! quota before an operation.
//!
//! A *permit* is a reservation in a quota, which ends when the permit is dropped. A *draft* is a
//! snapshot that its engine has not published yet.

use super::{OperationError, SandboxIndex, Sandboxes, SandboxesInner};
use crate::quota::{OwnerQuota, QuotaAmount, QuotaPermit, QuotaRequest};
use crate::sandbox::Sandbox;
use crate::snapshot::Snapshot;
use jiffy_api_types::{SandboxState, SnapshotPurpose};
use jiffy_engine_api::{SandboxSize, steps};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Quotas of owners and their usage.
#[derive(Clone, Copy)]
pub struct OwnerBudgets<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Returns the operations on quotas of owners.
    pub fn budgets(&self) -> OwnerBudgets<'_> {
        OwnerBudgets(&self.0)
    }
}

/// Minimum free quota required to start a snapshot, in bytes: the size of the state and indexes of
/// a small guest.
const MIN_SNAPSHOT_QUOTA: u64 = 1 << 20;
/// Maximum number of bytes of state and indexes in a snapshot, in addition to 1/512 of the guest's
/// memory and disk.
const SNAPSHOT_OVERHEAD: u64 = 16 << 20;

/// Usage of one owner's sandboxes and snapshots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerUsage {
    /// Running sandboxes.
    pub sandboxes: u64,
    /// Virtual CPUs of the running sandboxes.
    pub vcpus: u64,
    /// Memory of the running sandboxes, in MiB.
    pub memory_mib: u64,
    /// Sandboxes that are paused, or will be paused at their timeout.
    pub paused: u64,
    /// Snapshots requested by clients.
    pub snapshots: u64,
    /// Bytes of snapshots that were taken by pauses and forks, and are still in use.
    pub paused_bytes: u64,
    /// Bytes of snapshots requested by clients.
    pub snapshot_bytes: u64,
    /// Bytes of snapshots of build steps.
    pub step_bytes: u64,
}

/// Returns the maximum number of bytes of a snapshot of a guest of `size`.
fn max_snapshot_bytes(size: SandboxSize) -> u64 {
    let guest = u64::from(size.memory_mib).saturating_add(size.disk_mib) << 20;
    // The sums cannot overflow: both sizes are far below 2^40 MiB.
    guest + guest / 512 + SNAPSHOT_OVERHEAD
}

impl OwnerBudgets<'_> {
    /// Sets the quotas of owners. They apply to operations that start afterwards.
    pub fn limit(self, quota: Arc<dyn OwnerQuota>) {
        *self.0.quota.lock() = Some(quota);
    }

    pub(super) fn quota(self) -> Option<Arc<dyn OwnerQuota>> {
        self.0.quota.lock().clone()
    }

    /// Returns the usage of `owner`. It is computed from the owner's records, so it cannot deviate
    /// from them. This takes a few microseconds per thousand records, and records of other owners
    /// are not read.
    pub fn usage(self, owner: &str) -> OwnerUsage {
        let mut used = OwnerUsage::default();
        {
            let snapshots = self.0.catalog.read();
            for snapshot in snapshots.owned_by(owner) {
                used.snapshots += u64::from(snapshot.is_requested());
                let bytes = match snapshot.purpose {
                    SnapshotPurpose::Requested => &mut used.snapshot_bytes,
                    SnapshotPurpose::Step => &mut used.step_bytes,
                    // Snapshots of templates are taken without an owner.
                    SnapshotPurpose::Pause | SnapshotPurpose::Fork | SnapshotPurpose::Template => {
                        &mut used.paused_bytes
                    }
                };
                *bytes = bytes.saturating_add(snapshot.bytes);
            }
        }
        // The ids are copied, so that records are not locked while the index is.
        let ids = SandboxIndex(self.0).of_owner(owner);
        let entries = self.0.entries.lock();
        for entry in ids.iter().filter_map(|id| entries.get(id.as_str())) {
            entry.with_record(|record| {
                used.paused += u64::from(record.counts_as_paused());
                if record.state == SandboxState::Running {
                    used.sandboxes += 1;
                    used.vcpus += u64::from(record.size.vcpus);
                    used.memory_mib += u64::from(record.size.memory_mib);
                }
            });
        }
        used
    }

    /// Reserves the amounts of `request` in the quota of `owner`. Without an owner or without
    /// quotas, returns an unlimited permit.
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

    /// Reserves quota for the snapshot `draft` of `sandbox`: disk space, and one paused sandbox or
    /// one requested snapshot, depending on the purpose of `draft`.
    pub(super) async fn reserve_snapshot(
        self,
        draft: &Snapshot,
        sandbox: &Sandbox,
    ) -> Result<QuotaPermit, OperationError> {
        let _step = steps::begin("quota");
        let pauses = draft.purpose == SnapshotPurpose::Pause && !sandbox.counts_as_paused();
        let amount = QuotaAmount {
            paused: u64::from(pauses),
            snapshots: u64::from(draft.is_requested()),
            disk_bytes: max_snapshot_bytes(draft.size),
            ..QuotaAmount::default()
        };
        let request = QuotaRequest {
            amount,
            disk_floor: Some(MIN_SNAPSHOT_QUOTA),
        };
        self.reserve(draft.owner.as_deref(), request).await
    }
}
