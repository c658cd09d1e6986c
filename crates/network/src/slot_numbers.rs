//! Numbers of slots.

use std::collections::BTreeSet;

/// Numbers in use. Released ones are reused as late as possible: peers may still send to the
/// former guest.
#[derive(Debug)]
pub(crate) struct SlotNumbers {
    most: u32,
    next: u32,
    used: BTreeSet<u32>,
    /// Of those, the unclaimed ones of an earlier daemon.
    unclaimed: BTreeSet<u32>,
    /// Free, but blocked by remains of another program.
    blocked: BTreeSet<u32>,
}

impl SlotNumbers {
    /// Numbers below `most`.
    pub fn new(most: u32) -> Self {
        Self {
            most,
            next: 0,
            used: BTreeSet::new(),
            unclaimed: BTreeSet::new(),
            blocked: BTreeSet::new(),
        }
    }

    pub fn most(&self) -> u32 {
        self.most
    }

    pub fn in_use(&self) -> usize {
        self.used.len()
    }

    /// Takes a free number.
    pub fn take(&mut self) -> Option<u32> {
        let mut tried = (0..self.most).map(|i| (self.next + i) % self.most);
        let free =
            tried.find(|number| !self.used.contains(number) && !self.blocked.contains(number))?;
        self.next = (free + 1) % self.most;
        self.used.insert(free);
        Some(free)
    }

    /// Returns a number that cannot be used, and is not tried again.
    pub fn block(&mut self, number: u32) {
        self.give_back(number);
        self.blocked.insert(number);
    }

    /// Enters a number that an earlier daemon used; a second call claims it.
    pub fn enter(&mut self, number: u32) {
        if self.used.insert(number) {
            self.unclaimed.insert(number);
        } else {
            self.unclaimed.remove(&number);
        }
    }

    /// Returns true if an earlier daemon used it and it is unclaimed.
    pub fn is_unclaimed(&self, number: u32) -> bool {
        self.unclaimed.contains(&number)
    }

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
        assert_eq!((numbers.in_use(), numbers.most()), (3, 3));
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
        numbers.enter(0);
        numbers.enter(2);
        assert_eq!([numbers.take(), numbers.take()], [Some(1), Some(3)]);
        assert!(numbers.is_unclaimed(0) && !numbers.is_unclaimed(1));
        numbers.enter(0);
        assert!(!numbers.is_unclaimed(0));
        numbers.give_back(2);
        assert_eq!(numbers.take(), Some(2));
    }
}
