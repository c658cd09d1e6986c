//! Queue of builds that wait for a permit. Permits are assigned round robin by owner. If there are
//! several permits, no key may hold all of them.
//!
//! A *permit* counts towards a limit until it is dropped.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Owner of a build: an API key, or the host's owner.
type Owner = Option<String>;

/// Running and waiting builds.
#[derive(Debug, Default)]
struct QueueState {
    /// Number of permits that each owner holds.
    running: HashMap<Owner, usize>,
    /// Number of permits that all owners hold.
    permits_taken: usize,
    /// Owners with waiting builds, the next one first.
    round_robin: VecDeque<Owner>,
    /// Builds that wait, by owner, oldest first.
    waiting: HashMap<Owner, VecDeque<oneshot::Sender<BuildPermit>>>,
}

/// Permits for builds. Clones share their state.
#[derive(Debug, Clone)]
pub(super) struct BuildQueue {
    /// Maximum number of running builds.
    permits: usize,
    state: Arc<Mutex<QueueState>>,
}

/// Permit for one build, released on drop.
#[derive(Debug)]
pub(super) struct BuildPermit {
    queue: BuildQueue,
    owner: Owner,
    /// True if the permit counts in `QueueState::permits_taken`, so that a drop must release it.
    taken: bool,
}

impl Drop for BuildPermit {
    fn drop(&mut self) {
        if self.taken {
            self.queue.release(&self.owner);
        }
    }
}

impl BuildQueue {
    /// Creates a queue for this many concurrent builds.
    pub fn new(permits: usize) -> Self {
        Self {
            // Without permits, no build would ever start.
            permits: permits.max(1),
            state: Arc::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock()
    }

    /// Returns the maximum number of permits of one owner. A key leaves one permit to other owners,
    /// because builds may take hours. The host's owner may hold all permits.
    fn max_permits(&self, owner: &Owner) -> usize {
        match owner {
            Some(_) => (self.permits - 1).max(1),
            None => self.permits,
        }
    }

    /// Waits for a permit. Calls `on_wait` if no permit is free. Returns `None` if the queue is
    /// dropped.
    pub async fn acquire(
        &self,
        owner: Option<&str>,
        on_wait: impl FnOnce(),
    ) -> Option<BuildPermit> {
        let owner: Owner = owner.map(str::to_owned);
        let mut permit = {
            let (sender, receiver) = oneshot::channel();
            let mut state = self.state();
            let waiters = state.waiting.entry(owner.clone()).or_default();
            // Drops waiters that were cancelled.
            waiters.retain(|waiting| !waiting.is_closed());
            waiters.push_back(sender);
            if !state.round_robin.contains(&owner) {
                state.round_robin.push_back(owner);
            }
            // The new waiter may receive a permit at once.
            self.grant(&mut state);
            receiver
        };
        // The usual case: a permit is free, and the caller prints no message.
        match permit.try_recv() {
            Ok(permit) => Some(permit),
            Err(oneshot::error::TryRecvError::Empty) => {
                on_wait();
                permit.await.ok()
            }
            Err(oneshot::error::TryRecvError::Closed) => None,
        }
    }

    /// Assigns free permits in round-robin order. The caller holds the lock of `state`.
    fn grant(&self, state: &mut QueueState) {
        while state.permits_taken < self.permits {
            let may = |state: &QueueState, owner: &Owner| {
                let running = state.running.get(owner).copied().unwrap_or(0);
                running < self.max_permits(owner)
            };
            let Some(at) = state.round_robin.iter().position(|owner| may(state, owner)) else {
                return;
            };
            let Some(owner) = state.round_robin.remove(at) else {
                return;
            };
            let waiters = state.waiting.get_mut(&owner);
            let first = waiters.and_then(|waiters| {
                // Cancelled waiters lose their position.
                std::iter::from_fn(|| waiters.pop_front()).find(|waiting| !waiting.is_closed())
            });
            let Some(first) = first else {
                state.waiting.remove(&owner);
                continue;
            };
            let has_waiters = |waiters: &VecDeque<_>| !waiters.is_empty();
            if state.waiting.get(&owner).is_some_and(has_waiters) {
                // The owner's next build waits until every other owner had a permit.
                state.round_robin.push_back(owner.clone());
            } else {
                state.waiting.remove(&owner);
            }
            let permit = BuildPermit {
                queue: self.clone(),
                owner: owner.clone(),
                taken: true,
            };
            // Dropping a `BuildPermit` takes the lock of `state`, which is held here. A permit that
            // is not sent is therefore marked as not taken before it is dropped.
            match first.send(permit) {
                Ok(()) => {
                    state.permits_taken += 1;
                    *state.running.entry(owner).or_default() += 1;
                }
                // The waiter was cancelled meanwhile: the permit is still free.
                Err(mut permit) => permit.taken = false,
            }
        }
    }

    fn release(&self, owner: &Owner) {
        let mut state = self.state();
        state.permits_taken -= 1;
        if let Some(running) = state.running.get_mut(owner) {
            *running -= 1;
            if *running == 0 {
                // Entries without permits are removed, so that the map does not grow with the
                // owners.
                state.running.remove(owner);
            }
        }
        self.grant(&mut state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    async fn acquire(queue: &BuildQueue, owner: &str) -> BuildPermit {
        queue.acquire(Some(owner), || ()).await.unwrap()
    }

    /// Returns whether `future` is pending.
    fn waits<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        future.poll(&mut context).is_pending()
    }

    #[tokio::test]
    async fn a_key_leaves_a_permit_to_other_keys() {
        let queue = BuildQueue::new(2);
        let _first = acquire(&queue, "a").await;
        let mut second = pin!(acquire(&queue, "a"));
        assert!(waits(second.as_mut()));
        let other = acquire(&queue, "b").await;
        drop(other);
        assert!(waits(second.as_mut()), "the permit stays free");
        let _host = queue.acquire(None, || ()).await.unwrap();
    }

    #[tokio::test]
    async fn the_hosts_owner_may_hold_all_permits() {
        let queue = BuildQueue::new(2);
        let _first = queue.acquire(None, || ()).await.unwrap();
        let _second = queue.acquire(None, || ()).await.unwrap();
        let was_called = std::cell::Cell::new(false);
        let mut third = pin!(queue.acquire(None, || was_called.set(true)));
        assert!(waits(third.as_mut()) && was_called.get());
    }

    #[tokio::test]
    async fn permits_are_granted_round_robin_by_owner() {
        let queue = BuildQueue::new(1);
        let running = acquire(&queue, "a").await;
        let pending: Vec<_> = (0..3).map(|_| Box::pin(acquire(&queue, "a"))).collect();
        let mut pending: Vec<_> = pending.into_iter().collect();
        for build in &mut pending {
            assert!(waits(build.as_mut()));
        }
        let mut other = Box::pin(acquire(&queue, "b"));
        assert!(waits(other.as_mut()));
        drop(running);
        // The first waiting build of `a` receives the permit, then the build of `b`, and then the
        // other builds of `a`.
        let first = pending.remove(0).await;
        assert!(waits(other.as_mut()));
        drop(first);
        let other = other.await;
        assert!(waits(pending[0].as_mut()));
        drop(other);
        drop(pending.remove(0).await);
    }

    #[tokio::test]
    async fn a_cancelled_build_releases_its_place_and_permit() {
        let queue = BuildQueue::new(1);
        let running = acquire(&queue, "a").await;
        let mut cancelled = Box::pin(acquire(&queue, "b"));
        assert!(waits(cancelled.as_mut()));
        drop(cancelled);
        drop(running);
        let next = acquire(&queue, "c").await;
        let mut granted = Box::pin(acquire(&queue, "b"));
        assert!(waits(granted.as_mut()));
        // The permit was sent to a waiter that is dropped before it receives the permit.
        drop(next);
        drop(granted);
        drop(acquire(&queue, "d").await);
        let state = queue.state();
        assert_eq!((state.permits_taken, state.running.len()), (0, 0));
        assert!(state.waiting.is_empty() && state.round_robin.is_empty());
    }
}
