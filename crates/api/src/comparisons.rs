//! Cache of the results of comparisons. A comparison is expensive, and clients request its result
//! in pages.

use jiffy_sandbox_manager::ComparedFiles;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of results.
const MAX_RESULTS: usize = 8;
/// Maximum number of results of one caller.
const MAX_OF_CALLER: usize = 2;
/// Maximum size of all paths in bytes.
const MAX_BYTES: usize = 64 << 20;
/// Bytes of a difference in addition to its path.
const DIFFERENCE_BYTES: usize = 128;
/// Time after the last use at which a result expires.
const LIFETIME: Duration = Duration::from_secs(300);

/// Result of a comparison.
struct StoredComparison {
    id: String,
    /// Key of the caller. `None` for the host's owner.
    caller: Option<String>,
    result: Arc<ComparedFiles>,
    bytes: usize,
    used_at: Instant,
}

/// Latest results, the oldest first.
#[derive(Default)]
pub(crate) struct StoredComparisons(Mutex<VecDeque<StoredComparison>>);

impl StoredComparisons {
    /// Stores a result of a caller. Drops the oldest of too many results.
    pub fn add(&self, id: String, caller: Option<String>, result: Arc<ComparedFiles>) {
        let sizes = result.differences.iter();
        let bytes = sizes.map(|d| d.path.len() + DIFFERENCE_BYTES).sum();
        let mut all = self.0.lock();
        all.retain(|stored| stored.used_at.elapsed() < LIFETIME);
        let own = |all: &VecDeque<StoredComparison>| {
            all.iter().filter(|stored| stored.caller == caller).count()
        };
        // Drops the oldest results: first of the caller, then of all callers.
        while own(&all) >= MAX_OF_CALLER {
            let oldest = all.iter().position(|stored| stored.caller == caller);
            oldest.and_then(|at| all.remove(at));
        }
        let total = |all: &VecDeque<StoredComparison>| all.iter().map(|s| s.bytes).sum::<usize>();
        while all.len() >= MAX_RESULTS || (total(&all) + bytes > MAX_BYTES && !all.is_empty()) {
            all.pop_front();
        }
        all.push_back(StoredComparison {
            id,
            caller,
            result,
            bytes,
            used_at: Instant::now(),
        });
    }

    /// Returns the result with this id, if it belongs to the caller.
    pub fn get(&self, id: &str, caller: Option<&str>) -> Option<Arc<ComparedFiles>> {
        let mut all = self.0.lock();
        all.retain(|stored| stored.used_at.elapsed() < LIFETIME);
        let found = all.iter_mut().find(|stored| stored.id == id)?;
        if found.caller.as_deref() != caller {
            return None;
        }
        found.used_at = Instant::now();
        Some(found.result.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_belong_to_their_caller_and_the_oldest_is_dropped() {
        let stored = StoredComparisons::default();
        let result = || {
            Arc::new(ComparedFiles {
                differences: Vec::new(),
                is_incomplete: false,
                start_ms: 0.0,
                compare_ms: 0.0,
            })
        };
        let key = || Some("key".to_owned());
        for id in ["a", "b", "c"] {
            stored.add(id.to_owned(), key(), result());
        }
        stored.add("owner".to_owned(), None, result());
        assert!(stored.get("a", Some("key")).is_none());
        assert!(stored.get("c", Some("key")).is_some());
        assert!(stored.get("c", Some("other")).is_none());
        assert!(stored.get("c", None).is_none());
        assert!(stored.get("owner", None).is_some());
    }
}
