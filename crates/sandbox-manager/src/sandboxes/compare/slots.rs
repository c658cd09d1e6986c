//! Limits of simultaneous comparisons: their guests count towards no limit of a key.

use crate::sandboxes::OperationError;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of comparisons at the same time.
const MAX_COMPARISONS: usize = 4;
/// Maximum number of comparisons of one owner at the same time.
const MAX_OF_OWNER: usize = 2;
/// Time after which a rejected comparison should be retried.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// Numbers of comparisons in flight, by owner.
type Counts = HashMap<Option<String>, usize>;

/// Slots for comparisons.
#[derive(Default)]
pub(in crate::sandboxes) struct ComparisonSlots(Arc<Mutex<Counts>>);

/// Slot that is occupied until it is dropped.
pub(super) struct ComparisonSlot {
    counts: Arc<Mutex<Counts>>,
    /// API key that requested the comparison. `None` for the owner of the host.
    owner: Option<String>,
}

impl Drop for ComparisonSlot {
    fn drop(&mut self) {
        let mut counts = self.counts.lock();
        if let Some(count) = counts.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.owner);
            }
        }
    }
}

impl ComparisonSlots {
    /// Takes a slot, which counts as a comparison in flight until it is dropped.
    ///
    /// # Errors
    /// Fails if too many comparisons are in flight.
    pub(super) fn take(&self, owner: Option<String>) -> Result<ComparisonSlot, OperationError> {
        let busy = |what: &str| OperationError::Busy {
            what: what.to_owned(),
            retry_after: RETRY_AFTER,
        };
        let mut counts = self.0.lock();
        if counts.get(&owner).copied().unwrap_or(0) >= MAX_OF_OWNER {
            return Err(busy("two comparisons of this key are in progress"));
        }
        if counts.values().sum::<usize>() >= MAX_COMPARISONS {
            return Err(busy("too many comparisons are in progress on this host"));
        }
        *counts.entry(owner.clone()).or_default() += 1;
        Ok(ComparisonSlot {
            counts: self.0.clone(),
            owner,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_owner_cannot_use_all_slots() {
        let slots = ComparisonSlots::default();
        let take = |owner: &str| slots.take(Some(owner.to_owned()));
        let first = take("a").unwrap();
        let _second = take("a").unwrap();
        assert!(take("a").is_err());
        let _other = take("b").unwrap();
        let _last = take("b").unwrap();
        assert!(take("c").is_err());
        drop(first);
        assert!(take("c").is_ok());
    }
}
