//! Parts of the journal's records that only the lineage (`sandboxes/lineage.rs`) needs: rollbacks
//! of sandboxes, and removed ancestors of snapshots.
//!
//! The *lineage* of a sandbox or snapshot consists of the snapshots and sandboxes that are
//! connected with it: ancestors, descendants, and sandboxes created from them.

use crate::snapshot::Snapshot;
use jiffy_api_types::SnapshotPurpose;
use jiffy_engine_api::now_ms;
use serde::{Deserialize, Serialize};

/// Maximum number of rollbacks in the record of a sandbox. Each commit writes the whole record.
const MAX_ROLLBACKS: usize = 32;

/// Rollback of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollback {
    /// Snapshot to which the sandbox was rolled back.
    pub snapshot: String,
    /// Time of the rollback, in milliseconds since 1970.
    pub at_ms: u64,
}

impl Rollback {
    /// Adds a rollback to `snapshot` at the present time. Drops the oldest of too many rollbacks.
    pub(crate) fn add(rollbacks: &mut Vec<Self>, snapshot: Option<&str>) {
        let Some(snapshot) = snapshot else { return };
        let excess = (rollbacks.len() + 1).saturating_sub(MAX_ROLLBACKS);
        rollbacks.drain(..excess);
        rollbacks.push(Self {
            snapshot: snapshot.to_owned(),
            at_ms: now_ms(),
        });
    }
}

/// Removed snapshots between a snapshot and its parent. Only the newest of them is described, so
/// that the size of a record does not depend on the number of removals.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrunedAncestors {
    /// Id of the newest removed snapshot.
    pub newest: String,
    /// Sandbox that the newest removed snapshot was taken of.
    pub sandbox: String,
    /// Time of the creation of the newest removed snapshot, in milliseconds since 1970.
    pub created_ms: u64,
    /// Number of removed snapshots.
    pub count: u64,
}

impl PrunedAncestors {
    /// Records in `child` that its parent `removed` is removed. Snapshots of pauses are not
    /// recorded: each pause replaces the one before. Snapshots of another owner are not recorded
    /// either, because the owner of `child` may not see them.
    pub(crate) fn add_to(child: &mut Snapshot, removed: &Snapshot) {
        let is_recorded = matches!(
            removed.purpose,
            SnapshotPurpose::Requested | SnapshotPurpose::Fork
        );
        if removed.owner != child.owner {
            return;
        }
        let own = is_recorded.then(|| Self {
            newest: removed.id.clone(),
            sandbox: removed.sandbox.clone(),
            created_ms: removed.created_ms,
            count: 1,
        });
        // From the newest to the oldest.
        let all = [child.pruned.take(), own, removed.pruned.clone()];
        child.pruned = all.into_iter().flatten().reduce(|newer, older| Self {
            count: newer.count.saturating_add(older.count),
            ..newer
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_rollbacks_are_retained() {
        let mut rollbacks = Vec::new();
        for at in 0..MAX_ROLLBACKS + 5 {
            Rollback::add(&mut rollbacks, Some(&format!("s{at}")));
        }
        assert_eq!(rollbacks.len(), MAX_ROLLBACKS);
        assert_eq!(rollbacks[0].snapshot, "s5");
        assert_eq!(rollbacks[MAX_ROLLBACKS - 1].snapshot, "s36");
    }
}
