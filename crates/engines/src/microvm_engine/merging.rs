//! Merges and folds of snapshots, and the lock that they share. A merge combines a snapshot with
//! its ancestors to keep the lineage short. A fold combines a removed snapshot with its child to
//! reclaim disk space.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. A *layer* is the
//! part of a memory or disk that one snapshot stores: the content that differs from its ancestors.

use jiffy_engine_api::{
    EngineError, FoldPace, FoldPreparation, FoldResult, LineageLimits, PreparedFold,
};
use jiffy_snapshot::{Lineage, Store};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{Mutex, OwnedMutexGuard};

/// Maximum number of bytes that an early merge may copy: a merge before the lineage reaches its
/// maximum length. The copy takes some tens of milliseconds in the page cache.
const MAX_CHEAP_BYTES: u64 = 64 << 20;

/// Maximum number of manifests that are followed: a damaged manifest may lead to a cycle.
const MAX_LINEAGE: usize = 64;

/// Lock that is held while merged or folded snapshots replace others. Merges and folds run one at a
/// time: they read and write much data, and they must not see each other's unfinished work.
#[derive(Debug, Default)]
pub(super) struct MergeLock {
    lock: Arc<Mutex<()>>,
    /// Number of merges that wait for the lock or hold it. A fold is cancelled while it is not
    /// zero, because a restore may wait for the merge.
    merges: AtomicUsize,
}

/// Guard of a merge.
pub(super) struct MergeGuard<'a> {
    merges: &'a AtomicUsize,
    /// `None` until the lock is held.
    guard: Option<OwnedMutexGuard<()>>,
}

impl Drop for MergeGuard<'_> {
    fn drop(&mut self) {
        // Release the lock before the counter, which includes the merge that holds the lock.
        drop(self.guard.take());
        self.merges.fetch_sub(1, Ordering::AcqRel);
    }
}

impl MergeLock {
    /// Acquires the lock for a merge. A fold in progress is cancelled.
    pub async fn lock_for_merge(&self) -> MergeGuard<'_> {
        self.merges.fetch_add(1, Ordering::AcqRel);
        // Create the guard before waiting: if the caller stops waiting, dropping the guard restores
        // the counter.
        let mut waiting = MergeGuard {
            merges: &self.merges,
            guard: None,
        };
        waiting.guard = Some(self.lock.clone().lock_owned().await);
        waiting
    }

    /// Prepares a fold of the parent of snapshot `id` into it. The lock is held until the fold is
    /// committed or dropped. The fold is cancelled if a merge holds the lock or waits for it.
    pub fn prepare_fold(
        &self,
        store: &Store,
        id: &str,
        max_copy: u64,
        pace: &mut FoldPace<'_>,
    ) -> FoldResult {
        // A fold never waits: the caller tries again later.
        let Ok(guard) = self.lock.clone().try_lock_owned() else {
            return Ok(FoldPreparation::Cancelled);
        };
        let mut is_cancelled = false;
        // The store calls this closure after each copied piece, so a waiting merge cancels the fold
        // soon.
        let mut paced = |bytes| {
            let paced = match self.merges.load(Ordering::Acquire) {
                0 => pace(bytes),
                _ => ControlFlow::Break(()),
            };
            is_cancelled |= paced.is_break();
            paced
        };
        let fold = store.prepare_fold(id, max_copy, &mut paced);
        let Some(fold) = fold.map_err(EngineError::failed)? else {
            return Ok(if is_cancelled {
                FoldPreparation::Cancelled
            } else {
                FoldPreparation::Refused
            });
        };
        let parent = fold.parent().to_owned();
        // The lock is held until the files are replaced.
        let commit = move || {
            let folded = fold.commit().map_err(EngineError::failed);
            drop(guard);
            folded
        };
        Ok(FoldPreparation::Ready(PreparedFold::new(parent, commit)))
    }
}

/// Returns the index of the oldest snapshot of `lineage` with which the newest one must be merged.
/// `None` if the lineage is short enough.
pub(super) fn oldest(lineage: &Lineage, limits: LineageLimits) -> Option<usize> {
    let length = lineage.snapshots().len();
    if length <= limits.cheap {
        return None;
    }
    let oldest = lineage.oldest_to_merge(MAX_CHEAP_BYTES);
    // A merge from `oldest` leaves `oldest + 1` snapshots, which must be at most `limits.cheap`.
    if oldest < limits.cheap {
        return Some(oldest);
    }
    // A lineage above the maximum length is merged completely, even if the copy takes long.
    (length > limits.longest).then_some(0)
}

/// Returns an upper bound for the bytes by which this merge increases the newest snapshot.
pub(super) fn growth(lineage: &Lineage, oldest: usize) -> Option<u64> {
    // Sum of the sizes of the merged layers. A chunk that occurs in several layers is stored only
    // once in the result.
    let (_, others) = lineage.snapshots().get(oldest..)?.split_last()?;
    let mut bytes = others.iter().map(|s| s.bytes().unwrap_or(0));
    bytes.try_fold(0u64, u64::checked_add)
}

/// Returns whether snapshot `id` depends on the files of `ancestor`. Also true if a manifest cannot
/// be read.
pub(super) fn depends_on(store: &Store, id: &str, ancestor: &str) -> bool {
    let mut id = id.to_owned();
    for _ in 0..MAX_LINEAGE {
        match store.manifest(&id).map(|manifest| manifest.parent) {
            Ok(Some(parent)) if parent != ancestor => id = parent,
            Ok(parent) => return parent.is_some(),
            Err(_) => return true,
        }
    }
    true
}
