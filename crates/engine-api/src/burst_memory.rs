//! Memory of bursts: determines how many objects (for example spare processes) a stock should hold
//! in advance.
//!
//! Many uses in quick succession, for example by the children of a fork, are likely to recur. After
//! a burst, the stock is therefore large enough for the same burst for some minutes.

use std::time::{Duration, Instant};

/// Maximum time between two uses of the same burst.
const BURST_GAP: Duration = Duration::from_millis(250);
/// Time for which a burst is remembered.
const BURST_RETENTION: Duration = Duration::from_mins(5);

/// Recent uses of a stock, and the remembered burst.
#[derive(Debug)]
pub struct BurstMemory {
    /// Size of the stock without a burst.
    usual: usize,
    /// Maximum size of the stock after a burst.
    max: usize,
    /// Time of the last use. `None` before the first one.
    last_use: Option<Instant>,
    /// Number of uses in the current burst that found the stock empty.
    missed: usize,
    /// Size of the stock while a burst is remembered, and the last time when this size was needed.
    after_burst: Option<(usize, Instant)>,
}

impl BurstMemory {
    /// Creates a record of bursts for a stock of `usual` objects, and of at most `max` objects
    /// after a burst. If `usual` is 0, the stock stays empty.
    pub fn new(usual: usize, max: usize) -> Self {
        Self {
            usual,
            max: max.max(usual),
            last_use: None,
            missed: 0,
            after_burst: None,
        }
    }

    /// Records a use. `remaining` is the number of objects left in the stock, or `None` if the
    /// stock was empty.
    pub fn note_use(&mut self, now: Instant, remaining: Option<usize>) {
        let continues_burst = self.last_use.is_some_and(|last| now < last + BURST_GAP);
        self.last_use = Some(now);
        // A new burst begins.
        if !continues_burst {
            self.missed = 0;
        }
        if let Some(remaining) = remaining {
            // More objects are in use than the usual stock has: the larger stock was needed.
            if let Some((size, last)) = &mut self.after_burst
                && remaining + self.usual < *size
            {
                *last = now;
            }
            return;
        }
        // Do not remember bursts of a stock that stays empty.
        if self.usual == 0 {
            return;
        }
        self.missed += 1;
        // The usual stock was used up as well, so the burst needed both numbers.
        let size = (self.usual + self.missed).min(self.max);
        // A smaller burst does not reduce the stock while a larger one is remembered.
        let previous = self.after_burst.map_or(0, |(size, _)| size);
        self.after_burst = Some((size.max(previous), now));
    }

    /// Returns the size of the stock without a burst.
    pub fn usual(&self) -> usize {
        self.usual
    }

    /// Returns the time of the last use.
    pub fn last_use(&self) -> Option<Instant> {
        self.last_use
    }

    /// Returns the current target size of the stock.
    pub fn target(&self, now: Instant) -> usize {
        match self.after_burst {
            // An expired burst is ignored even if `remembered_for` was not called since.
            Some((size, last)) if now < last + BURST_RETENTION => size,
            _ => self.usual,
        }
    }

    /// Returns the time until the burst is forgotten. `None` if no burst is remembered.
    pub fn remembered_for(&mut self, now: Instant) -> Option<Duration> {
        let (_, last) = self.after_burst?;
        let rest = (last + BURST_RETENTION).saturating_duration_since(now);
        if rest.is_zero() {
            self.after_burst = None;
        }
        self.after_burst.map(|_| rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records `count` uses of an empty stock, `gap` apart, and returns the time of the last one.
    fn misses(memory: &mut BurstMemory, from: Instant, count: u32, gap: Duration) -> Instant {
        for n in 0..count {
            memory.note_use(from + gap * n, None);
        }
        from + gap * (count - 1)
    }

    #[test]
    fn after_a_burst_the_stock_suffices_for_the_same_burst() {
        let mut memory = BurstMemory::new(2, 20);
        let begin = Instant::now();
        assert_eq!(memory.target(begin), 2);
        assert_eq!(memory.remembered_for(begin), None);
        let last = misses(&mut memory, begin, 8, Duration::from_millis(5));
        // The usual stock of 2, and the 8 uses of the burst that found it empty. The maximum is 20.
        assert_eq!(memory.target(last), 10);
        assert_eq!(memory.remembered_for(last), Some(BURST_RETENTION));
        assert_eq!(memory.target(last + BURST_RETENTION), 2);
        let last = misses(&mut memory, last, 1000, Duration::from_millis(5));
        assert_eq!(memory.target(last), 20);
    }

    #[test]
    fn a_burst_does_not_enlarge_an_empty_stock() {
        let mut memory = BurstMemory::new(0, 20);
        let last = misses(&mut memory, Instant::now(), 8, Duration::from_millis(5));
        assert_eq!(memory.target(last), 0);
    }

    #[test]
    fn slow_uses_are_not_a_burst() {
        let mut memory = BurstMemory::new(2, 20);
        // Each use is a burst of its own, for which one object was missing.
        let last = misses(&mut memory, Instant::now(), 100, BURST_GAP);
        assert_eq!(memory.target(last), 3);
    }

    #[test]
    fn a_burst_is_remembered_while_the_larger_stock_is_used() {
        let mut memory = BurstMemory::new(2, 20);
        let first = misses(&mut memory, Instant::now(), 8, Duration::from_millis(5));
        let second = first + BURST_RETENTION / 2;
        // This use empties the stock of ten.
        memory.note_use(second, Some(0));
        assert_eq!(memory.target(first + BURST_RETENTION), 10);
        // Eight of ten are left: two would have been enough.
        memory.note_use(second + BURST_RETENTION / 2, Some(8));
        assert_eq!(memory.target(second + BURST_RETENTION), 2);
        assert_eq!(memory.remembered_for(second + BURST_RETENTION), None);
    }
}
