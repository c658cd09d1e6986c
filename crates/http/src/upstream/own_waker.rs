//! Waker for futures that one task polls together and that wake each other.
//!
//! A wake-up during the task's own poll only means that the futures must be polled again. If the
//! waker passed such a wake-up to the runtime, the runtime would schedule the task again after the
//! poll and wake another worker thread.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Maximum number of consecutive polls before other tasks can run.
const MAX_ROUNDS: usize = 8;

/// State of [`OwnWaker`] without a running poll and without a wake-up. The flags below are set in
/// addition.
const IDLE: u8 = 0;
/// A poll is running.
const POLLING: u8 = 1;
/// A future was woken since the start of the last poll.
const WOKEN: u8 = 2;

/// State of a task's polls, and the task's waker.
struct OwnWaker {
    state: AtomicU8,
    task: Mutex<Waker>,
}

impl OwnWaker {
    fn set_task(&self, waker: &Waker) {
        let mut task = self.task.lock();
        task.clone_from(waker);
    }
}

impl Wake for OwnWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // During a poll, only record the wake-up. After an earlier wake-up, the task is woken
        // already. Each wake-up writes the state, even if it is recorded: all changes of the state
        // are read-modify-write operations, so that the next poll sees the data of all wakers.
        if self.state.fetch_or(WOKEN, Ordering::AcqRel) == IDLE {
            // Clone under the lock, but wake the task after releasing it.
            let task = self.task.lock();
            let task = task.clone();
            task.wake();
        }
    }
}

/// Poll state of futures that belong to one task at a time.
pub(crate) struct OwnPolls {
    state: Arc<OwnWaker>,
    waker: Waker,
}

impl OwnPolls {
    pub(crate) fn new() -> Self {
        let state = Arc::new(OwnWaker {
            state: AtomicU8::new(IDLE),
            task: Mutex::new(Waker::noop().clone()),
        });
        let waker = Waker::from(state.clone());
        Self { state, waker }
    }

    /// Calls `poll` until it is ready or until no future was woken during the call. After several
    /// calls, yields to other tasks.
    pub(crate) fn poll<T>(
        &mut self,
        context: &mut Context<'_>,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        // The task may have changed since the last poll.
        self.state.set_task(context.waker());
        let state = &self.state.state;
        let mut own = Context::from_waker(&self.waker);
        for _ in 0..MAX_ROUNDS {
            state.swap(POLLING, Ordering::AcqRel);
            let polled = poll(&mut own);
            if polled.is_ready() {
                state.swap(IDLE, Ordering::AcqRel);
                return polled;
            }
            // Fails if a future was woken meanwhile: poll again.
            let idle = state.compare_exchange(POLLING, IDLE, Ordering::AcqRel, Ordering::Acquire);
            if idle.is_ok() {
                return Poll::Pending;
            }
        }
        state.swap(IDLE, Ordering::AcqRel);
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    struct Counter(AtomicUsize);

    impl Wake for Counter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_wake_up_during_a_poll_repeats_it_and_others_wake_the_task() {
        let counter = Arc::new(Counter(AtomicUsize::new(0)));
        let woken = || counter.0.load(Ordering::Relaxed);
        let task = Waker::from(counter.clone());
        let mut context = Context::from_waker(&task);
        let mut polls = OwnPolls::new();
        let mut rounds = 0;
        let polled = polls.poll(&mut context, |own| {
            rounds += 1;
            own.waker().wake_by_ref();
            match rounds {
                3 => Poll::Ready(()),
                _ => Poll::Pending,
            }
        });
        assert_eq!((polled, rounds, woken()), (Poll::Ready(()), 3, 0));

        let mut waker = None;
        let polled = polls.poll(&mut context, |own| {
            waker = Some(own.waker().clone());
            Poll::<()>::Pending
        });
        assert_eq!((polled, woken()), (Poll::Pending, 0));
        waker.unwrap().wake();
        assert_eq!(woken(), 1);

        // A future that always wakes itself does not prevent other tasks from running.
        let polled = polls.poll(&mut context, |own| {
            own.waker().wake_by_ref();
            Poll::<()>::Pending
        });
        assert_eq!((polled, woken()), (Poll::Pending, 2));
    }
}
