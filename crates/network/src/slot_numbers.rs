//! [`SlotNumbers`]: allocates the numbers of slots, from which their names and addresses follow.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. A slot of an earlier daemon is *claimed* when this daemon adopts
//! its guest. Unclaimed slots are removed.

use std::collections::BTreeSet;

/// Allocated numbers. Released numbers are reused as late as possible, because peers may still send
/// packets to the previous guest.
#[derive(Debug)]
pub(crate) struct SlotNumbers {
    /// Maximum number of slots. All numbers are below it.
    limit: u32,
    /// First number that the next allocation tries.
    next: u32,
    /// Allocated and registered numbers.
    used: BTreeSet<u32>,
    /// Subset of the used numbers: unclaimed slots of an earlier daemon.
    unclaimed: BTreeSet<u32>,
    /// Numbers that are free but blocked by remains of a crash.
    blocked: BTreeSet<u32>,
}

impl SlotNumbers {
    /// Creates an allocator of the numbers below `limit`.
    pub fn new(limit: u32) -> Self {
        Self {
            limit,
            next: 0,
            used: BTreeSet::new(),
            unclaimed: BTreeSet::new(),
            blocked: BTreeSet::new(),
        }
    }

    /// Returns the maximum number of slots.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns how many numbers are allocated or registered.
    pub fn in_use(&self) -> usize {
        self.used.len()
    }

    /// Allocates a free number.
    pub fn take(&mut self) -> Option<u32> {
        // Try every number once, starting after the last allocated one.
        let mut tried = (0..self.limit).map(|i| (self.next + i) % self.limit);
        let free =
            tried.find(|number| !self.used.contains(number) && !self.blocked.contains(number))?;
        // Continue after the last number, so that a released number is reused as late as possible.
        self.next = (free + 1) % self.limit;
        self.used.insert(free);
        Some(free)
    }

    /// Releases an unusable number and excludes it from allocation.
    pub fn block(&mut self, number: u32) {
        self.give_back(number);
        self.blocked.insert(number);
    }

    /// Registers a number that an earlier daemon used. A second call claims it.
    pub fn register(&mut self, number: u32) {
        if self.used.insert(number) {
            self.unclaimed.insert(number);
        } else {
            self.unclaimed.remove(&number);
        }
    }

    /// Returns true if the number belongs to an earlier daemon's slot and is unclaimed.
    pub fn is_unclaimed(&self, number: u32) -> bool {
        self.unclaimed.contains(&number)
    }

    /// Releases a number.
    pub fn give_back(&mut self, number: u32) {
        self.used.remove(&number);
        self.unclaimed.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_number_is_reused_last() {
        let mut numbers = SlotNumbers::new(3);
        assert_eq!([numbers.take(), numbers.take()], [Some(0), Some(1)]);
        numbers.give_back(0);
        assert_eq!([numbers.take(), numbers.take()], [Some(2), Some(0)]);
        assert_eq!(numbers.take(), None);
        assert_eq!((numbers.in_use(), numbers.limit()), (3, 3));
    }

    #[test]
    fn a_blocked_number_blocks_no_other() {
        let mut numbers = SlotNumbers::new(2);
        assert_eq!(numbers.take(), Some(0));
        numbers.block(0);
        assert_eq!([numbers.take(), numbers.take()], [Some(1), None]);
        assert_eq!(numbers.in_use(), 1);
    }

    #[test]
    fn numbers_of_an_earlier_daemon_are_in_use_until_claimed_or_released() {
        let mut numbers = SlotNumbers::new(4);
        numbers.register(0);
        numbers.register(2);
        assert_eq!([numbers.take(), numbers.take()], [Some(1), Some(3)]);
        assert!(numbers.is_unclaimed(0) && !numbers.is_unclaimed(1));
        numbers.register(0);
        assert!(!numbers.is_unclaimed(0));
        numbers.give_back(2);
        assert_eq!(numbers.take(), Some(2));
    }
}
