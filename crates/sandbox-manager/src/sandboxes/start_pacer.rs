//! Limits concurrent resumes and fork children. If all of them shared the processors, each would
//! take longer and handle more timer ticks, and none would be complete before nearly all are. Slots
//! are assigned to owners in round-robin order. Creates are not limited: this would only delay
//! their start while other guests run their own work.

use jiffy_engine_api::steps;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::sleep;

/// Concurrent starts for each processor: a starting guest sometimes waits.
const STARTS_PER_PROCESSOR: usize = 2;
/// Maximum time for which a start holds its slot. A start that takes longer waits for another
/// resource than a processor, and does not delay the others.
const MAX_TURN: Duration = Duration::from_millis(100);

/// Limiter of starts on a host.
pub(super) struct StartPacer(Arc<Mutex<Places>>);

struct Places {
    free: usize,
    /// Owners with waiting starts, in round-robin order: the first is next and then moves to the
    /// end.
    waiting: VecDeque<WaitingStarts>,
}

struct WaitingStarts {
    owner: Option<String>,
    starts: VecDeque<oneshot::Sender<Turn>>,
}

impl Places {
    fn wait(&mut self, owner: Option<&str>) -> oneshot::Receiver<Turn> {
        let (give, waits) = oneshot::channel();
        let mut known = self.waiting.iter_mut();
        match known.find(|waiting| waiting.owner.as_deref() == owner) {
            Some(waiting) => waiting.starts.push_back(give),
            None => self.waiting.push_back(WaitingStarts {
                owner: owner.map(str::to_owned),
                starts: VecDeque::from([give]),
            }),
        }
        waits
    }

    /// Removes the next start from the queue.
    fn next(&mut self) -> Option<oneshot::Sender<Turn>> {
        let mut waiting = self.waiting.pop_front()?;
        let next = waiting.starts.pop_front();
        if !waiting.starts.is_empty() {
            self.waiting.push_back(waiting);
        }
        next
    }
}

/// Guard: occupies a slot until it is dropped.
struct Turn(Option<Arc<Mutex<Places>>>);

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(places) = self.0.take() else {
            return;
        };
        loop {
            let mut locked = places.lock();
            let Some(next) = locked.next() else {
                locked.free += 1;
                return;
            };
            // Dropping a rejected permit locks the slots again.
            drop(locked);
            match next.send(Self(Some(places.clone()))) {
                Ok(()) => return,
                // The start was cancelled while it waited.
                Err(mut turn) => turn.0 = None,
            }
        }
    }
}

impl StartPacer {
    pub fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self(Arc::new(Mutex::new(Places {
            free: processors * STARTS_PER_PROCESSOR,
            waiting: VecDeque::new(),
        })))
    }

    async fn turn(&self, owner: Option<&str>) -> Turn {
        let waits = {
            let mut places = self.0.lock();
            if places.free > 0 {
                places.free -= 1;
                return Turn(Some(self.0.clone()));
            }
            places.wait(owner)
        };
        // The sender is dropped without a permit only together with the pacer.
        waits.await.unwrap_or(Turn(None))
    }

    /// Waits for a slot, and starts a guest of `owner`.
    pub async fn pace<T>(&self, owner: Option<&str>, start: impl Future<Output = T>) -> T {
        let step = steps::begin("queue");
        let mut turn = Some(self.turn(owner).await);
        drop(step);
        let (mut start, mut end) = (pin!(start), pin!(sleep(MAX_TURN)));
        loop {
            tokio::select! {
                biased;
                started = &mut start => return started,
                () = &mut end, if turn.is_some() => turn = None,
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
    async fn a_start_that_waits_for_something_else_than_a_processor_holds_up_no_other() {
        let pacer = Arc::new(StartPacer::new());
        let places = pacer.0.lock().free;
        let (begun, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let began = Instant::now();
        let starts = (0..places * 2).map(|_| {
            let (pacer, begun, over) = (pacer.clone(), begun.clone(), over.clone());
            tokio::spawn(async move {
                let start = async {
                    begun.fetch_add(1, Ordering::Relaxed);
                    over.notified().await;
                };
                pacer.pace(None, start).await;
            })
        });
        let starts: Vec<_> = starts.collect();
        let reach = async |count| {
            while begun.load(Ordering::Relaxed) < count {
                tokio::task::yield_now().await;
            }
        };
        reach(places).await;
        reach(places + 1).await;
        assert!(began.elapsed() >= MAX_TURN);
        reach(places * 2).await;
        over.notify_waiters();
        for start in starts {
            start.await.unwrap();
        }
        // All slots are free again.
        assert_eq!(pacer.0.lock().free, places);
    }

    #[tokio::test]
    async fn owners_take_turns_however_many_starts_one_of_them_has() {
        let pacer = Arc::new(StartPacer::new());
        let places = pacer.0.lock().free;
        let mut taken = Vec::new();
        for _ in 0..places {
            taken.push(pacer.turn(Some("a")).await);
        }
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let waiting = || -> usize {
            let places = pacer.0.lock();
            places.waiting.iter().map(|w| w.starts.len()).sum()
        };
        let owners = ["a", "a", "a", "a", "b", "b", "c"];
        for (at, owner) in owners.into_iter().enumerate() {
            let (pacer, tell) = (pacer.clone(), tell.clone());
            let start = async move {
                tell.send(owner).unwrap();
                tokio::task::yield_now().await;
            };
            tokio::spawn(async move { pacer.pace(Some(owner), start).await });
            while waiting() <= at {
                tokio::task::yield_now().await;
            }
        }
        // A cancelled start is skipped.
        let gives_up = tokio::spawn({
            let pacer = pacer.clone();
            async move { pacer.pace(Some("d"), async {}).await }
        });
        while waiting() <= owners.len() {
            tokio::task::yield_now().await;
        }
        gives_up.abort();
        assert!(gives_up.await.unwrap_err().is_cancelled());
        drop(taken.pop());
        let mut heard = Vec::new();
        for _ in owners {
            heard.push(told.recv().await.unwrap());
        }
        assert_eq!(heard, ["a", "b", "c", "a", "b", "a", "a"]);
        drop(taken);
        while pacer.0.lock().free < places {
            tokio::task::yield_now().await;
        }
        assert_eq!(waiting(), 0);
    }
}
