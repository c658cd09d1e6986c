//! Queue of the owners whose modules must be synchronised with the shared store. Failed attempts
//! are repeated with increasing delays.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Maximum number of owners that are processed at once.
const MAX_RUNNING: usize = 4;
/// Delay after the first failure, doubled for each further failure.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay between two attempts.
const MAX_DELAY: Duration = Duration::from_secs(60);

/// Owner of modules: the id of an API key. `None` for the operator.
type Key = Option<String>;

/// Owners to synchronise. An owner is removed when all its modules are synchronised.
#[derive(Debug, Default)]
pub(crate) struct ModuleQueue {
    /// Owners in the queue, with the state of their synchronisation.
    work: Mutex<HashMap<Key, SyncState>>,
    /// Notified of each change.
    pub changed: Notify,
}

/// Pending or running synchronisation of one owner.
#[derive(Debug)]
struct SyncState {
    /// Time of the next attempt.
    due: Instant,
    /// Number of consecutive failed attempts.
    failures: u32,
    /// True while an attempt runs.
    is_running: bool,
    /// True if the owner's modules changed after the running attempt started.
    is_stale: bool,
}

/// Returns the delay after a failure that follows `failures` consecutive failures.
fn delay(failures: u32) -> Duration {
    // The minimum prevents an overflow of the shift.
    FIRST_DELAY
        .saturating_mul(1 << failures.min(16))
        .min(MAX_DELAY)
}

impl ModuleQueue {
    /// Queues an owner for an immediate attempt. After a failure, the time of the next attempt does
    /// not change.
    pub(crate) fn add(&self, key: Key) {
        let mut work = self.work.lock();
        let entry = work.entry(key).or_insert_with(|| SyncState {
            due: Instant::now(),
            failures: 0,
            is_running: false,
            is_stale: false,
        });
        // The running attempt may have missed the change.
        entry.is_stale = entry.is_running;
        drop(work);
        self.changed.notify_one();
    }

    /// Starts the attempts that are due, up to [`MAX_RUNNING`] at once. Returns their owners.
    pub(crate) fn start_due(&self) -> Vec<Key> {
        let now = Instant::now();
        let mut work = self.work.lock();
        let running = work.values().filter(|work| work.is_running).count();
        let due = work.iter_mut();
        let due = due.filter(|(_, work)| !work.is_running && work.due <= now);
        let started = due.take(MAX_RUNNING.saturating_sub(running));
        started
            .map(|(key, work)| {
                work.is_running = true;
                key.clone()
            })
            .collect()
    }

    /// Completes an attempt. Returns whether it is the first of consecutive failures. `is_done`
    /// states whether the attempt succeeded.
    pub(crate) fn complete(&self, key: &Key, is_done: bool) -> bool {
        let mut work = self.work.lock();
        let Some(entry) = work.get_mut(key) else {
            return false;
        };
        entry.is_running = false;
        let is_first = !is_done && entry.failures == 0;
        match (is_done, std::mem::take(&mut entry.is_stale)) {
            // The owner is synchronised: it leaves the queue until its next change.
            (true, false) => drop(work.remove(key)),
            // The owner changed during the attempt: `due` is in the past, so that the next attempt
            // starts at once.
            (true, true) => entry.failures = 0,
            (false, _) => {
                entry.due = Instant::now() + delay(entry.failures);
                entry.failures = entry.failures.saturating_add(1);
            }
        }
        self.changed.notify_one();
        is_first
    }

    /// Waits until the queue changes or an attempt is due. May return too early.
    pub(crate) async fn wait(&self) {
        let next = {
            let work = self.work.lock();
            let waiting = work.values().filter(|work| !work.is_running);
            waiting.map(|work| work.due).min()
        };
        let is_due = async {
            match next {
                Some(due) if due > Instant::now() => tokio::time::sleep_until(due).await,
                // No owner waits, or the owners that are due wait for running attempts.
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            () = is_due => {}
            () = self.changed.notified() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Some(name.to_owned())
    }

    #[tokio::test(start_paused = true)]
    async fn delays_grow_after_failures_and_do_not_affect_other_owners() {
        let queue = ModuleQueue::default();
        queue.add(key("bad"));
        let mut before = Duration::ZERO;
        for attempt in 0..12 {
            assert_eq!(queue.start_due(), [key("bad")]);
            assert_eq!(queue.complete(&key("bad"), false), attempt == 0);
            // A change does not shorten the delay.
            queue.add(key("bad"));
            assert!(queue.start_due().is_empty());
            queue.add(key("good"));
            assert_eq!(queue.start_due(), [key("good")]);
            queue.complete(&key("good"), true);
            let start = Instant::now();
            while queue.work.lock()[&key("bad")].due > Instant::now() {
                queue.wait().await;
            }
            let waited = start.elapsed();
            assert!(waited >= before && waited <= MAX_DELAY + Duration::from_millis(2));
            before = waited;
        }
        assert!(before >= MAX_DELAY);
        queue.start_due();
        queue.complete(&key("bad"), true);
        assert!(queue.work.lock().is_empty());
    }

    #[tokio::test]
    async fn changes_during_an_attempt_cause_another_and_attempts_are_bounded() {
        let queue = ModuleQueue::default();
        for number in 0..10 {
            queue.add(key(&number.to_string()));
        }
        let started = queue.start_due();
        assert_eq!((started.len(), queue.start_due().len()), (MAX_RUNNING, 0));
        queue.add(started[0].clone());
        queue.complete(&started[0], true);
        queue.complete(&started[1], true);
        let work = queue.work.lock();
        assert!(work.contains_key(&started[0]) && !work.contains_key(&started[1]));
        drop(work);
        assert_eq!(queue.start_due().len(), 2);
    }
}
