//! Numbers of slots.

use std::collections::BTreeSet;

/// Which numbers are in use. What was given back is used again as late as possible: the world may still send to whoever had it.
#[derive(Debug)]
pub(crate) struct Numbers {
    most: u32,
    next: u32,
    used: BTreeSet<u32>,
    /// Of those, the ones that an earlier daemon left and nobody has claimed.
    left: BTreeSet<u32>,
    /// Free, but something of another program is in their way.
    blocked: BTreeSet<u32>,
}

impl Numbers {
    /// Numbers below `most`.
    pub fn new(most: u32) -> Self {
        Self {
            most,
            next: 0,
            used: BTreeSet::new(),
            left: BTreeSet::new(),
            blocked: BTreeSet::new(),
        }
    }

    pub fn most(&self) -> u32 {
        self.most
    }

    pub fn in_use(&self) -> usize {
        self.used.len()
    }

    /// One that is free.
    pub fn take(&mut self) -> Option<u32> {
        let mut tried = (0..self.most).map(|i| (self.next + i) % self.most);
        let free =
            tried.find(|number| !self.used.contains(number) && !self.blocked.contains(number))?;
        self.next = (free + 1) % self.most;
        self.used.insert(free);
        Some(free)
    }

    /// Gives one back that cannot be used, and is not tried again.
    pub fn block(&mut self, number: u32) {
        self.give_back(number);
        self.blocked.insert(number);
    }

    /// Enters one that an earlier daemon used; a second time, it has been claimed.
    pub fn enter(&mut self, number: u32) {
        if self.used.insert(number) {
            self.left.insert(number);
        } else {
            self.left.remove(&number);
        }
    }

    /// Whether an earlier daemon left it and nobody has claimed it.
    pub fn is_left(&self, number: u32) -> bool {
        self.left.contains(&number)
    }

    pub fn give_back(&mut self, number: u32) {
        self.used.remove(&number);
        self.left.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_back_is_used_again_last() {
        let mut numbers = Numbers::new(3);
        assert_eq!([numbers.take(), numbers.take()], [Some(0), Some(1)]);
        numbers.give_back(0);
        assert_eq!([numbers.take(), numbers.take()], [Some(2), Some(0)]);
        assert_eq!(numbers.take(), None);
        assert_eq!((numbers.in_use(), numbers.most()), (3, 3));
    }

    #[test]
    fn what_is_in_the_way_of_one_number_is_in_the_way_of_no_other() {
        let mut numbers = Numbers::new(2);
        assert_eq!(numbers.take(), Some(0));
        numbers.block(0);
        assert_eq!([numbers.take(), numbers.take()], [Some(1), None]);
        assert_eq!(numbers.in_use(), 1);
    }

    #[test]
    fn what_an_earlier_daemon_left_is_in_use_until_it_is_claimed_or_given_back() {
        let mut numbers = Numbers::new(4);
        numbers.enter(0);
        numbers.enter(2);
        assert_eq!([numbers.take(), numbers.take()], [Some(1), Some(3)]);
        assert!(numbers.is_left(0) && !numbers.is_left(1));
        numbers.enter(0);
        assert!(!numbers.is_left(0));
        numbers.give_back(2);
        assert_eq!(numbers.take(), Some(2));
    }
}
