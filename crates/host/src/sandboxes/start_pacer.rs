//! Starts of many guests at once, a few at a time: on processors that all of them share each takes
//! longer, meets more ticks of its clock, and none is done before nearly all are.

use std::pin::pin;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::sleep;

/// Starts at a time for each processor of the host: a guest waits now and then.
const STARTS_PER_PROCESSOR: usize = 2;
/// Time for which a start keeps its place; one that takes longer waits for something else than a
/// processor, and does not hold up the others.
const MAX_TURN: Duration = Duration::from_millis(100);

/// Places of starts.
pub(super) struct StartPacer(Semaphore);

impl StartPacer {
    pub fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self(Semaphore::new(processors * STARTS_PER_PROCESSOR))
    }

    /// Waits for a place, and starts a guest.
    pub async fn pace<T>(&self, start: impl Future<Output = T>) -> T {
        let mut turn = self.0.acquire().await.ok();
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;
    use tokio::sync::Notify;

    #[tokio::test]
    async fn a_start_that_waits_for_something_else_than_a_processor_holds_up_no_other() {
        let pacer = Arc::new(StartPacer::new());
        let places = pacer.0.available_permits();
        let (begun, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let began = Instant::now();
        let starts = (0..places * 2).map(|_| {
            let (pacer, begun, over) = (pacer.clone(), begun.clone(), over.clone());
            tokio::spawn(async move {
                let start = async {
                    begun.fetch_add(1, Ordering::Relaxed);
                    over.notified().await;
                };
                pacer.pace(start).await;
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
        // All places are there again.
        assert_eq!(pacer.0.available_permits(), places);
    }
}
