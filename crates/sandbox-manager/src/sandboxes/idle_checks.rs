//! [`IdleChecks`]: the time of the next idle check of each running sandbox with an idle timeout.

use super::list_order::SharedPosition;
use parking_lot::Mutex;
use smol_str::SmolStr;
use std::collections::{BTreeMap, BTreeSet};

/// Next check of each running sandbox with an idle timeout. Times are
/// [`super::use_clock::clock_ms`].
#[derive(Debug, Default)]
pub(crate) struct IdleChecks(Mutex<CheckTimes>);

/// Times of the next checks, in milliseconds, by id and in order.
#[derive(Debug, Default)]
struct CheckTimes {
    by_id: BTreeMap<SmolStr, u64>,
    by_time: BTreeSet<SharedPosition>,
}

impl IdleChecks {
    /// Schedules the next check of a sandbox. Replaces the previous time.
    pub fn schedule(&self, id: &SmolStr, at_ms: u64) {
        let mut times = self.0.lock();
        if let Some(before) = times.by_id.insert(id.clone(), at_ms) {
            times.by_time.remove(&(before, id.clone()));
        }
        times.by_time.insert((at_ms, id.clone()));
    }

    /// Removes the next check of a sandbox.
    pub fn remove(&self, id: &SmolStr) {
        let mut times = self.0.lock();
        if let Some(at_ms) = times.by_id.remove(id) {
            times.by_time.remove(&(at_ms, id.clone()));
        }
    }

    /// Returns the time of the first check.
    pub fn next(&self) -> Option<u64> {
        self.0.lock().by_time.first().map(|(at_ms, _)| *at_ms)
    }

    /// Removes the checks up to `now_ms`, and returns their sandboxes.
    pub fn take_due(&self, now_ms: u64) -> Vec<SmolStr> {
        let mut times = self.0.lock();
        let mut due = Vec::new();
        while let Some(first) = times.by_time.first()
            && first.0 <= now_ms
            && let Some((_, id)) = times.by_time.pop_first()
        {
            times.by_id.remove(&id);
            due.push(id);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_has_at_most_one_check_and_due_checks_are_returned_once() {
        let checks = IdleChecks::default();
        let [a, b] = ["a", "b"].map(SmolStr::new);
        checks.schedule(&a, 10);
        checks.schedule(&b, 20);
        checks.schedule(&a, 30);
        assert_eq!(checks.next(), Some(20));
        assert_eq!(checks.take_due(19), Vec::<SmolStr>::new());
        assert_eq!(checks.take_due(30), [b.clone(), a.clone()]);
        assert_eq!((checks.next(), checks.take_due(u64::MAX)), (None, vec![]));
        checks.schedule(&a, 5);
        checks.remove(&a);
        checks.remove(&b);
        assert_eq!((checks.next(), checks.take_due(u64::MAX)), (None, vec![]));
    }
}
