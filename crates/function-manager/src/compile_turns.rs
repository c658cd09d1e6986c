//! Turns of compilers: few compile at once, and each of them leaves its turn to the next.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;

/// Turns in the order of requests. Calls block.
#[derive(Debug)]
pub struct CompileTurns {
    count: usize,
    queue: Mutex<TurnQueue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct TurnQueue {
    taken: usize,
    next_ticket: u64,
    /// Tickets of the waiting compilers, oldest first.
    waiting: VecDeque<u64>,
}

/// A turn, given back when this value is dropped.
#[derive(Debug)]
pub(crate) struct CompileTurn<'a>(&'a CompileTurns);

impl CompileTurns {
    /// `count` turns at once.
    pub fn new(count: usize) -> Self {
        Self {
            count,
            queue: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Waits for a turn.
    pub(crate) fn take(&self) -> CompileTurn<'_> {
        let mut queue = self.queue.lock();
        let ticket = queue.next_ticket;
        queue.next_ticket += 1;
        queue.waiting.push_back(ticket);
        while queue.taken >= self.count || queue.waiting.front() != Some(&ticket) {
            self.changed.wait(&mut queue);
        }
        queue.waiting.pop_front();
        queue.taken += 1;
        drop(queue);
        // The next one may have a turn as well.
        self.changed.notify_all();
        CompileTurn(self)
    }

    /// Returns whether a compiler waits for a turn.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.queue.lock().waiting.is_empty()
    }
}

impl Drop for CompileTurn<'_> {
    fn drop(&mut self) {
        self.0.queue.lock().taken -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait_for_waiting(turns: &CompileTurns, count: usize) {
        while turns.queue.lock().waiting.len() != count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn turns_are_given_in_the_order_of_requests_and_no_more_than_there_are() {
        let turns = CompileTurns::new(2);
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let (first, second) = (turns.take(), turns.take());
            assert!(!turns.is_awaited());
            for number in 0..5 {
                let (turns, order) = (&turns, &order);
                scope.spawn(move || {
                    let _turn = turns.take();
                    assert!(turns.queue.lock().taken <= 2);
                    order.lock().push(number);
                });
                wait_for_waiting(turns, number + 1);
            }
            assert!(turns.is_awaited() && order.lock().is_empty());
            drop(first);
            wait_for_waiting(&turns, 0);
            drop(second);
        });
        assert_eq!(*order.lock(), [0, 1, 2, 3, 4]);
        assert_eq!(turns.queue.lock().taken, 0);
    }
}
