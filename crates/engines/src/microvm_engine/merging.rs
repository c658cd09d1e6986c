//! Merges of snapshots with their ancestors, which keep lineages short, and folds of removed
//! snapshots into their children, which reclaim disk space.

use jiffy_engine_api::{
    EngineError, FoldPace, FoldPreparation, FoldResult, LineageLimits, PreparedFold,
};
use jiffy_snapshot::{Lineage, Store};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{Mutex, OwnedMutexGuard};

/// Most bytes that a merge copies which is made early: some tens of milliseconds in the page cache.
const MAX_CHEAP_BYTES: u64 = 64 << 20;

/// Manifests that are read at most: a damaged one may lead in a circle.
const MAX_LINEAGE: usize = 64;

/// Lock that is held while snapshots are replaced by merged or folded ones: one at a time, since
/// both read and write a lot, and neither may see the other's half-finished work.
#[derive(Debug, Default)]
pub(super) struct MergeLock {
    lock: Arc<Mutex<()>>,
    /// Merges that wait for the lock, or hold it. A restore waits for a merge, so that a fold gives
    /// way.
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
        drop(self.guard.take());
        self.merges.fetch_sub(1, Ordering::AcqRel);
    }
}

impl MergeLock {
    /// Locks for a merge. A fold in progress is cancelled.
    pub async fn lock_for_merge(&self) -> MergeGuard<'_> {
        self.merges.fetch_add(1, Ordering::AcqRel);
        // Before the wait: a caller that stops waiting must not count for ever.
        let mut waiting = MergeGuard {
            merges: &self.merges,
            guard: None,
        };
        waiting.guard = Some(self.lock.clone().lock_owned().await);
        waiting
    }

    /// Prepares a fold of the parent of snapshot `id` into it; holds the lock until the fold is
    /// committed or dropped. Cancelled if a merge holds the lock or waits for it.
    pub fn prepare_fold(
        &self,
        store: &Store,
        id: &str,
        max_copy: u64,
        pace: &mut FoldPace<'_>,
    ) -> FoldResult {
        let Ok(guard) = self.lock.clone().try_lock_owned() else {
            return Ok(FoldPreparation::Cancelled);
        };
        let mut is_cancelled = false;
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
            return Ok(match is_cancelled {
                true => FoldPreparation::Cancelled,
                false => FoldPreparation::Refused,
            });
        };
        let parent = fold.parent().to_owned();
        let commit = move || {
            let folded = fold.commit().map_err(EngineError::failed);
            drop(guard);
            folded
        };
        Ok(FoldPreparation::Ready(PreparedFold::new(parent, commit)))
    }
}

/// Number of the oldest snapshot of `lineage` with which its newest is to be merged; none: it is
/// short enough.
pub(super) fn oldest(lineage: &Lineage, limits: LineageLimits) -> Option<usize> {
    let length = lineage.snapshots().len();
    if length <= limits.cheap {
        return None;
    }
    let oldest = lineage.oldest_to_merge(MAX_CHEAP_BYTES);
    if oldest < limits.cheap {
        return Some(oldest);
    }
    (length > limits.longest).then_some(0)
}

/// Upper bound of the bytes by which the newest snapshot grows by that.
pub(super) fn growth(lineage: &Lineage, oldest: usize) -> Option<u64> {
    // All that the layers say together, each chunk once; a chunk that is in several makes it less.
    let (_, others) = lineage.snapshots().get(oldest..)?.split_last()?;
    let mut bytes = others.iter().map(|s| s.bytes().unwrap_or(0));
    bytes.try_fold(0u64, u64::checked_add)
}

/// True if the files of snapshot `id` lie on those of `ancestor`, or cannot be read.
pub(super) fn lies_on(store: &Store, id: &str, ancestor: &str) -> bool {
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
