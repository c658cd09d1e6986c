//! The queue of builds that wait for a slot: owners take turns, and no key has all slots.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Owner of a build: an API key, or the host's owner.
type Owner = Option<String>;

#[derive(Debug, Default)]
struct QueueState {
    running: HashMap<Owner, usize>,
    slots_taken: usize,
    /// Owners with builds that wait, the one whose turn is next first.
    turns: VecDeque<Owner>,
    waiting: HashMap<Owner, VecDeque<oneshot::Sender<BuildPermit>>>,
}

/// Slots for builds. Clones are the same.
#[derive(Debug, Clone)]
pub(super) struct BuildQueue {
    slots: usize,
    state: Arc<Mutex<QueueState>>,
}

/// A slot for one build, given back when this is dropped.
#[derive(Debug)]
pub(super) struct BuildPermit {
    queue: BuildQueue,
    owner: Owner,
    /// Whether it was handed to a build.
    taken: bool,
}

impl Drop for BuildPermit {
    fn drop(&mut self) {
        if self.taken {
            self.queue.give_back(&self.owner);
        }
    }
}

impl BuildQueue {
    /// A queue for `slots` builds at once.
    pub fn new(slots: usize) -> Self {
        Self {
            slots: slots.max(1),
            state: Arc::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Most slots of one owner. A key leaves one to the others, whoever waits: its builds may take hours. The host's owner may
    /// have all.
    fn most_slots(&self, owner: &Owner) -> usize {
        match owner {
            Some(_) => (self.slots - 1).max(1),
            None => self.slots,
        }
    }

    /// Waits for a slot; `on_wait` is told if there is none at once.
    pub async fn enter(&self, owner: Option<&str>, on_wait: impl FnOnce()) -> Option<BuildPermit> {
        let owner: Owner = owner.map(str::to_owned);
        let mut slot = {
            let (sender, receiver) = oneshot::channel();
            let mut state = self.state();
            let line = state.waiting.entry(owner.clone()).or_default();
            // Those that gave up need no place.
            line.retain(|waiting| !waiting.is_closed());
            line.push_back(sender);
            if !state.turns.contains(&owner) {
                state.turns.push_back(owner);
            }
            self.hand_out(&mut state);
            receiver
        };
        match slot.try_recv() {
            Ok(slot) => Some(slot),
            Err(oneshot::error::TryRecvError::Empty) => {
                on_wait();
                slot.await.ok()
            }
            Err(oneshot::error::TryRecvError::Closed) => None,
        }
    }

    /// Gives free slots to those whose turn it is.
    fn hand_out(&self, state: &mut QueueState) {
        while state.slots_taken < self.slots {
            let may = |state: &QueueState, owner: &Owner| {
                let running = state.running.get(owner).copied().unwrap_or(0);
                running < self.most_slots(owner)
            };
            let Some(at) = state.turns.iter().position(|owner| may(state, owner)) else {
                return;
            };
            let Some(owner) = state.turns.remove(at) else {
                return;
            };
            let line = state.waiting.get_mut(&owner);
            let first = line.and_then(|line| {
                // Those that gave up lose their place.
                std::iter::from_fn(|| line.pop_front()).find(|waiting| !waiting.is_closed())
            });
            let Some(first) = first else {
                state.waiting.remove(&owner);
                continue;
            };
            match state
                .waiting
                .get(&owner)
                .is_some_and(|line| !line.is_empty())
            {
                // Its next build waits until every other owner had a turn.
                true => state.turns.push_back(owner.clone()),
                false => drop(state.waiting.remove(&owner)),
            }
            let slot = BuildPermit {
                queue: self.clone(),
                owner: owner.clone(),
                taken: true,
            };
            match first.send(slot) {
                Ok(()) => {
                    state.slots_taken += 1;
                    *state.running.entry(owner).or_default() += 1;
                }
                // It gave up in this very moment: the slot was never taken.
                Err(mut slot) => slot.taken = false,
            }
        }
    }

    fn give_back(&self, owner: &Owner) {
        let mut state = self.state();
        state.slots_taken -= 1;
        if let Some(running) = state.running.get_mut(owner) {
            *running -= 1;
            if *running == 0 {
                state.running.remove(owner);
            }
        }
        self.hand_out(&mut state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    async fn enter(queue: &BuildQueue, owner: &str) -> BuildPermit {
        queue.enter(Some(owner), || ()).await.unwrap()
    }

    /// Whether `future` is still waiting.
    fn waits<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        future.poll(&mut context).is_pending()
    }

    #[tokio::test]
    async fn a_key_leaves_a_slot_to_other_keys() {
        let queue = BuildQueue::new(2);
        let _first = enter(&queue, "a").await;
        let mut second = pin!(enter(&queue, "a"));
        assert!(waits(second.as_mut()));
        let other = enter(&queue, "b").await;
        drop(other);
        assert!(waits(second.as_mut()), "the slot stays free");
        let _host = queue.enter(None, || ()).await.unwrap();
    }

    #[tokio::test]
    async fn the_hosts_owner_may_have_all_slots() {
        let queue = BuildQueue::new(2);
        let _first = queue.enter(None, || ()).await.unwrap();
        let _second = queue.enter(None, || ()).await.unwrap();
        let told = std::cell::Cell::new(false);
        let mut third = pin!(queue.enter(None, || told.set(true)));
        assert!(waits(third.as_mut()) && told.get());
    }

    #[tokio::test]
    async fn owners_take_turns_however_many_builds_one_has() {
        let queue = BuildQueue::new(1);
        let running = enter(&queue, "a").await;
        let many: Vec<_> = (0..3).map(|_| Box::pin(enter(&queue, "a"))).collect();
        let mut many: Vec<_> = many.into_iter().collect();
        for one in &mut many {
            assert!(waits(one.as_mut()));
        }
        let mut other = Box::pin(enter(&queue, "b"));
        assert!(waits(other.as_mut()));
        drop(running);
        // One of the first key's came first; the other key's is next, before the rest.
        let first = many.remove(0).await;
        assert!(waits(other.as_mut()));
        drop(first);
        let other = other.await;
        assert!(waits(many[0].as_mut()));
        drop(other);
        drop(many.remove(0).await);
    }

    #[tokio::test]
    async fn a_build_that_gives_up_holds_no_place_and_no_slot() {
        let queue = BuildQueue::new(1);
        let running = enter(&queue, "a").await;
        let mut gone = Box::pin(enter(&queue, "b"));
        assert!(waits(gone.as_mut()));
        drop(gone);
        drop(running);
        let next = enter(&queue, "c").await;
        let mut granted = Box::pin(enter(&queue, "b"));
        assert!(waits(granted.as_mut()));
        // The slot is on its way to one that leaves.
        drop(next);
        drop(granted);
        drop(enter(&queue, "d").await);
        let state = queue.state();
        assert_eq!((state.slots_taken, state.running.len()), (0, 0));
        assert!(state.waiting.is_empty() && state.turns.is_empty());
    }
}
