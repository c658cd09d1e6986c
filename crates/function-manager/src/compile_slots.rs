//! Slots for running compilers of WebAssembly modules. A *slot* is the permission to run: a
//! compiler process runs only while it has a slot. After a time slice it is suspended, and the slot
//! passes to the next waiting compiler.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;

/// Slots, assigned in the order of requests. Calls block.
#[derive(Debug)]
pub struct CompileSlots {
    /// Maximum number of running compilers.
    count: usize,
    queue: Mutex<SlotQueue>,
    changed: Condvar,
}

/// Number of running compilers, and the waiting ones.
#[derive(Debug, Default)]
struct SlotQueue {
    /// Number of running compilers.
    taken: usize,
    next_ticket: u64,
    /// Tickets of the waiting compilers, oldest first.
    waiting: VecDeque<u64>,
}

/// Occupied slot, released when this value is dropped.
#[derive(Debug)]
pub(crate) struct CompileSlot<'a>(&'a CompileSlots);

impl CompileSlots {
    /// Creates `count` slots.
    pub fn new(count: usize) -> Self {
        Self {
            count,
            queue: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Waits for a slot.
    pub(crate) fn take(&self) -> CompileSlot<'_> {
        let mut queue = self.queue.lock();
        // Tickets order the waiting threads: a condition variable wakes them in any order.
        let ticket = queue.next_ticket;
        queue.next_ticket += 1;
        queue.waiting.push_back(ticket);
        // A woken thread continues only if it has waited longest.
        while queue.taken >= self.count || queue.waiting.front() != Some(&ticket) {
            self.changed.wait(&mut queue);
        }
        queue.waiting.pop_front();
        queue.taken += 1;
        drop(queue);
        // A slot may be free for the next waiting compiler as well.
        self.changed.notify_all();
        CompileSlot(self)
    }

    /// Returns whether a compiler waits for a slot.
    pub(crate) fn has_waiters(&self) -> bool {
        !self.queue.lock().waiting.is_empty()
    }
}

impl Drop for CompileSlot<'_> {
    fn drop(&mut self) {
        self.0.queue.lock().taken -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits until `count` requests are queued.
    fn wait_for_waiting(slots: &CompileSlots, count: usize) {
        while slots.queue.lock().waiting.len() != count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn slots_are_assigned_in_the_order_of_requests_up_to_their_number() {
        let slots = CompileSlots::new(2);
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let (first, second) = (slots.take(), slots.take());
            assert!(!slots.has_waiters());
            for number in 0..5 {
                let (slots, order) = (&slots, &order);
                scope.spawn(move || {
                    let _slot = slots.take();
                    assert!(slots.queue.lock().taken <= 2);
                    order.lock().push(number);
                });
                wait_for_waiting(slots, number + 1);
            }
            assert!(slots.has_waiters() && order.lock().is_empty());
            // With one free slot, the requests add their numbers one after the other.
            drop(first);
            wait_for_waiting(&slots, 0);
            drop(second);
        });
        assert_eq!(*order.lock(), [0, 1, 2, 3, 4]);
        assert_eq!(slots.queue.lock().taken, 0);
    }
}
