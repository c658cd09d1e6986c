//! Merges of snapshots with their ancestors, so that lineages stay short.

use jiffy_engine::LineageLimits;
use jiffy_snapshot::{Lineage, Store};

/// Most bytes that a merge copies which is made early: some tens of milliseconds in the page cache.
const MAX_CHEAP_BYTES: u64 = 64 << 20;

/// Manifests that are read at most: a damaged one may lead in a circle.
const MAX_LINEAGE: usize = 64;

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
