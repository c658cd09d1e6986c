//! Limits concurrent resumes and fork children. If all of them shared the processors, each guest
//! would take longer and handle more timer ticks, and none would be complete before nearly all are.
//!
//! Each start needs one of a limited number of *slots*. Slots are assigned to owners in round-robin
//! order. Creates are not limited: this would only delay their start while other guests run their
//! own work.

use jiffy_engine_api::steps;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::sleep;

/// Concurrent starts for each processor. More than one, since a starting guest sometimes waits.
const STARTS_PER_PROCESSOR: usize = 2;
/// Maximum time for which a start holds its slot. A start that takes longer waits for another
/// resource than a processor, and does not delay the others.
const MAX_HOLD_TIME: Duration = Duration::from_millis(100);

/// Limiter of starts on a host.
pub(super) struct StartPacer(Arc<Mutex<StartSlots>>);

/// Free slots, and the starts that wait for one.
struct StartSlots {
    /// Number of free slots.
    free: usize,
    /// Owners with waiting starts, in round-robin order: the first owner is next, and then moves to
    /// the end.
    waiting: VecDeque<WaitingStarts>,
}

/// Waiting starts of one owner, oldest first.
struct WaitingStarts {
    /// API key. `None` for the owner of the host.
    owner: Option<String>,
    starts: VecDeque<oneshot::Sender<SlotGuard>>,
}

impl StartSlots {
    /// Appends a start to the queue of its owner. Free slots go to the owners in turn, so that one
    /// owner cannot delay all others.
    fn wait(&mut self, owner: Option<&str>) -> oneshot::Receiver<SlotGuard> {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.waiting.iter_mut();
        match waiting.find(|waiting| waiting.owner.as_deref() == owner) {
            Some(waiting) => waiting.starts.push_back(sender),
            None => self.waiting.push_back(WaitingStarts {
                owner: owner.map(str::to_owned),
                starts: VecDeque::from([sender]),
            }),
        }
        receiver
    }

    /// Removes the next start from the queue.
    fn next(&mut self) -> Option<oneshot::Sender<SlotGuard>> {
        let mut waiting = self.waiting.pop_front()?;
        let next = waiting.starts.pop_front();
        if !waiting.starts.is_empty() {
            self.waiting.push_back(waiting);
        }
        next
    }
}

/// Guard that occupies a slot until it is dropped. `None` if it occupies no slot.
struct SlotGuard(Option<Arc<Mutex<StartSlots>>>);

impl Drop for SlotGuard {
    fn drop(&mut self) {
        let Some(slots) = self.0.take() else {
            return;
        };
        loop {
            let mut locked = slots.lock();
            // A freed slot goes to the next waiting start directly, so that no new start can
            // overtake it.
            let Some(next) = locked.next() else {
                locked.free += 1;
                return;
            };
            // The slots are unlocked first: dropping a guard that was not received locks the slots
            // again.
            drop(locked);
            match next.send(Self(Some(slots.clone()))) {
                Ok(()) => return,
                // The start was cancelled while it waited: give the slot to the next one.
                Err(mut guard) => guard.0 = None,
            }
        }
    }
}

impl StartPacer {
    pub fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self(Arc::new(Mutex::new(StartSlots {
            free: processors * STARTS_PER_PROCESSOR,
            waiting: VecDeque::new(),
        })))
    }

    /// Waits for a slot, in which one sandbox may start. The guard returns the slot.
    async fn acquire(&self, owner: Option<&str>) -> SlotGuard {
        let receiver = {
            let mut slots = self.0.lock();
            if slots.free > 0 {
                slots.free -= 1;
                return SlotGuard(Some(self.0.clone()));
            }
            slots.wait(owner)
        };
        // The sender is dropped without a guard only together with the pacer.
        receiver.await.unwrap_or(SlotGuard(None))
    }

    /// Waits for a slot, and starts a guest of `owner`.
    pub async fn pace<T>(&self, owner: Option<&str>, start: impl Future<Output = T>) -> T {
        let step = steps::begin("queue");
        let mut guard = Some(self.acquire(owner).await);
        drop(step);
        let (mut start, mut end) = (pin!(start), pin!(sleep(MAX_HOLD_TIME)));
        // `biased`: a start that completes together with the timer returns at once.
        loop {
            tokio::select! {
                biased;
                started = &mut start => return started,
                () = &mut end, if guard.is_some() => guard = None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;
    use tokio::sync::Notify;

    #[tokio::test]
    async fn a_slow_start_releases_its_slot() {
        let pacer = Arc::new(StartPacer::new());
        let slots = pacer.0.lock().free;
        let (started_count, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let started_at = Instant::now();
        let starts = (0..slots * 2).map(|_| {
            let (pacer, started_count, over) = (pacer.clone(), started_count.clone(), over.clone());
            tokio::spawn(async move {
                let start = async {
                    started_count.fetch_add(1, Ordering::Relaxed);
                    over.notified().await;
                };
                pacer.pace(None, start).await;
            })
        });
        let starts: Vec<_> = starts.collect();
        let reach = async |count| {
            while started_count.load(Ordering::Relaxed) < count {
                tokio::task::yield_now().await;
            }
        };
        reach(slots).await;
        reach(slots + 1).await;
        assert!(started_at.elapsed() >= MAX_HOLD_TIME);
        reach(slots * 2).await;
        over.notify_waiters();
        for start in starts {
            start.await.unwrap();
        }
        // All slots are free again.
        assert_eq!(pacer.0.lock().free, slots);
    }

    #[tokio::test]
    async fn slots_are_assigned_to_owners_in_round_robin_order() {
        let pacer = Arc::new(StartPacer::new());
        let slots = pacer.0.lock().free;
        let mut guards = Vec::new();
        for _ in 0..slots {
            guards.push(pacer.acquire(Some("a")).await);
        }
        let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        let waiting = || -> usize {
            let slots = pacer.0.lock();
            slots.waiting.iter().map(|w| w.starts.len()).sum()
        };
        let owners = ["a", "a", "a", "a", "b", "b", "c"];
        for (at, owner) in owners.into_iter().enumerate() {
            let (pacer, sender) = (pacer.clone(), sender.clone());
            let start = async move {
                sender.send(owner).unwrap();
                tokio::task::yield_now().await;
            };
            tokio::spawn(async move { pacer.pace(Some(owner), start).await });
            while waiting() <= at {
                tokio::task::yield_now().await;
            }
        }
        // A cancelled start is skipped.
        let cancelled = tokio::spawn({
            let pacer = pacer.clone();
            async move { pacer.pace(Some("d"), async {}).await }
        });
        while waiting() <= owners.len() {
            tokio::task::yield_now().await;
        }
        cancelled.abort();
        assert!(cancelled.await.unwrap_err().is_cancelled());
        drop(guards.pop());
        let mut order = Vec::new();
        for _ in owners {
            order.push(receiver.recv().await.unwrap());
        }
        assert_eq!(order, ["a", "b", "c", "a", "b", "a", "a"]);
        drop(guards);
        while pacer.0.lock().free < slots {
            tokio::task::yield_now().await;
        }
        assert_eq!(waiting(), 0);
    }
}
