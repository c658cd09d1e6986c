//! Memory of bursts: how many of what is made in advance are likely to be wanted at once.
//!
//! Many uses at once, as by a fork's children, are likely to come again: after a burst there are as
//! many for some minutes as it would have taken.

use std::time::{Duration, Instant};

/// Uses that follow each other faster belong to one burst.
const BURST_GAP: Duration = Duration::from_millis(250);
/// Time for which a burst is remembered.
const MEMORY: Duration = Duration::from_mins(5);

/// Uses of a stock, and the burst that is remembered.
#[derive(Debug)]
pub struct BurstMemory {
    /// Size of the stock at all times.
    usual: usize,
    /// Largest size after a burst.
    most: usize,
    last_use: Option<Instant>,
    /// Uses of the current burst that found nothing.
    missed: usize,
    /// Size of the stock while a burst is remembered, and when that was last of use.
    after_burst: Option<(usize, Instant)>,
}

impl BurstMemory {
    /// For a stock of `usual` size, and of `most` after a burst; without a usual one there is none.
    pub fn new(usual: usize, most: usize) -> Self {
        Self {
            usual,
            most: most.max(usual),
            last_use: None,
            missed: 0,
            after_burst: None,
        }
    }

    /// Notes a use that found one, and left so many; none: it found nothing.
    pub fn note_use(&mut self, now: Instant, left: Option<usize>) {
        let goes_on = self.last_use.is_some_and(|last| now < last + BURST_GAP);
        self.last_use = Some(now);
        if !goes_on {
            self.missed = 0;
        }
        if let Some(left) = left {
            // Without the burst before there would have been none.
            if let Some((size, last)) = &mut self.after_burst
                && left + self.usual < *size
            {
                *last = now;
            }
            return;
        }
        // Nothing is kept where nothing is made in advance.
        if self.usual == 0 {
            return;
        }
        self.missed += 1;
        let size = (self.usual + self.missed).min(self.most);
        let known = self.after_burst.map_or(0, |(known, _)| known);
        self.after_burst = Some((size.max(known), now));
    }

    /// Size of the stock without bursts.
    pub fn usual(&self) -> usize {
        self.usual
    }

    /// Last use.
    pub fn last_use(&self) -> Option<Instant> {
        self.last_use
    }

    /// Size that the stock should have.
    pub fn target(&self, now: Instant) -> usize {
        match self.after_burst {
            Some((size, last)) if now < last + MEMORY => size,
            _ => self.usual,
        }
    }

    /// Time until the burst is forgotten; none: there is none, or it is forgotten now.
    pub fn remembered_for(&mut self, now: Instant) -> Option<Duration> {
        let (_, last) = self.after_burst?;
        let rest = (last + MEMORY).saturating_duration_since(now);
        if rest.is_zero() {
            self.after_burst = None;
        }
        self.after_burst.map(|_| rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes uses that find nothing, `gap` apart from each other, and returns the last moment.
    fn misses(memory: &mut BurstMemory, from: Instant, count: u32, gap: Duration) -> Instant {
        for n in 0..count {
            memory.note_use(from + gap * n, None);
        }
        from + gap * (count - 1)
    }

    #[test]
    fn after_a_burst_there_are_as_many_as_it_would_have_taken() {
        let mut memory = BurstMemory::new(2, 20);
        let begin = Instant::now();
        assert_eq!(memory.target(begin), 2);
        assert_eq!(memory.remembered_for(begin), None);
        let last = misses(&mut memory, begin, 8, Duration::from_millis(5));
        assert_eq!(memory.target(last), 10);
        assert_eq!(memory.remembered_for(last), Some(MEMORY));
        assert_eq!(memory.target(last + MEMORY), 2);
        let last = misses(&mut memory, last, 1000, Duration::from_millis(5));
        assert_eq!(memory.target(last), 20);
    }

    #[test]
    fn where_nothing_is_made_in_advance_a_burst_changes_nothing() {
        let mut memory = BurstMemory::new(0, 20);
        let last = misses(&mut memory, Instant::now(), 8, Duration::from_millis(5));
        assert_eq!(memory.target(last), 0);
    }

    #[test]
    fn uses_one_after_the_other_are_no_burst() {
        let mut memory = BurstMemory::new(2, 20);
        let last = misses(&mut memory, Instant::now(), 100, BURST_GAP);
        assert_eq!(memory.target(last), 3);
    }

    #[test]
    fn a_burst_is_remembered_while_its_stock_is_of_use() {
        let mut memory = BurstMemory::new(2, 20);
        let first = misses(&mut memory, Instant::now(), 8, Duration::from_millis(5));
        let second = first + MEMORY / 2;
        // None of ten is left after this use.
        memory.note_use(second, Some(0));
        assert_eq!(memory.target(first + MEMORY), 10);
        // Eight of ten are left: two would have been enough.
        memory.note_use(second + MEMORY / 2, Some(8));
        assert_eq!(memory.target(second + MEMORY), 2);
        assert_eq!(memory.remembered_for(second + MEMORY), None);
    }
}
