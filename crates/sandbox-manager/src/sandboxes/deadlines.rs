//! [`Deadlines`]: finds running sandboxes whose timeout has passed. The task in `timeout.rs` pauses
//! or kills them.

use super::entry::{Entries, SandboxEntry};
use super::entry_indexes::EntryIndexes;
use super::ranked_lock::RankedMutex;
use jiffy_engine_api::now_ms;
use smol_str::SmolStr;
use std::ops::Bound;
use std::sync::Arc;
use tokio::sync::Notify;

/// Finds sandboxes whose deadline has passed, and notifies the task that waits for the next
/// deadline.
pub(super) struct Deadlines {
    entries: Arc<RankedMutex<Entries>>,
    indexes: Arc<EntryIndexes>,
    has_changed: Arc<Notify>,
}

impl Deadlines {
    pub fn new(entries: Arc<RankedMutex<Entries>>, indexes: Arc<EntryIndexes>) -> Self {
        Self {
            entries,
            indexes,
            has_changed: Arc::default(),
        }
    }

    /// Notifies the waiting task that a deadline may have changed.
    pub fn notify(&self) {
        self.has_changed.notify_one();
    }

    /// Returns the notification of possible changes. A task that waits for it does not keep the
    /// sandboxes alive.
    pub fn has_changed(&self) -> Arc<Notify> {
        self.has_changed.clone()
    }

    /// Returns the first deadline that is not being handled, in milliseconds since 1970.
    pub fn next(&self) -> Option<u64> {
        let mut from = Bound::Unbounded;
        loop {
            let deadlines = self.indexes.deadlines.lock();
            let next = deadlines.range((from, Bound::Unbounded)).next().cloned()?;
            // The index is unlocked before the entry is read: a change of a record locks the record
            // and then the index.
            drop(deadlines);
            let entry = self.entries.lock().get(&next.1).cloned();
            if entry.is_some_and(|entry| entry.deadline().is_some()) {
                return Some(next.0);
            }
            from = Bound::Excluded(next);
        }
    }

    /// Returns the sandboxes whose deadline has passed and marks them as being handled. The caller
    /// handles each, and then calls [`Self::finish`].
    pub fn begin_due(&self) -> Vec<Arc<SandboxEntry>> {
        let now = now_ms();
        let deadlines = self.indexes.deadlines.lock();
        let past = deadlines.iter().take_while(|(at, _)| *at <= now);
        let ids: Vec<SmolStr> = past.map(|(_, id)| id.clone()).collect();
        drop(deadlines);
        let entries = self.entries.lock();
        let due = ids.iter().filter_map(|id| entries.get(id).cloned());
        let mut due: Vec<_> = due
            .filter(|entry| entry.deadline().is_some_and(|at| at <= now))
            .collect();
        drop(entries);
        // If two calls find the same sandbox, only the call that sets the mark returns it.
        due.retain(|entry| entry.begin_expiring());
        due
    }

    /// Ends the handling of a sandbox whose deadline has passed.
    pub fn finish(&self, entry: &SandboxEntry) {
        entry.end_expiring();
        self.notify();
    }
}
