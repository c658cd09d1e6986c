//! Pace of what is done for one guest: so many a second, and some at once after a rest.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Counts what is done, and says how long the next has to wait (generic cell rate algorithm).
#[derive(Debug)]
pub(crate) struct Pace {
    /// How many may be done at once after a rest.
    burst: u32,
    /// When the pace would be kept again without a burst.
    next: Mutex<Option<Instant>>,
}

impl Pace {
    pub fn new(burst: u32) -> Self {
        Self {
            burst,
            next: Mutex::new(None),
        }
    }

    /// Time until one more may be done at `now`, where there is one in each `interval`; it counts as done then.
    pub fn delay(&self, now: Instant, interval: Duration) -> Duration {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let due = next.map_or(now, |next| next.max(now));
        *next = Some(due + interval);
        due.duration_since(now)
            .saturating_sub(interval * self.burst.saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_free_and_the_rest_comes_one_after_the_other() {
        let (pace, now) = (Pace::new(3), Instant::now());
        let interval = Duration::from_millis(10);
        let delays = |count: u32, now| -> Vec<u128> {
            let all = (0..count).map(|_| pace.delay(now, interval).as_millis());
            all.collect()
        };
        assert_eq!(delays(5, now), [0, 0, 0, 10, 20]);
        // After a rest the burst is free again, and never more than it.
        assert_eq!(delays(4, now + Duration::from_secs(1)), [0, 0, 0, 10]);
        // A slower pace holds at once.
        let slow = Duration::from_secs(1);
        let later = now + Duration::from_secs(60);
        for _ in 0..3 {
            assert_eq!(pace.delay(later, slow), Duration::ZERO);
        }
        assert_eq!(pace.delay(later, slow), slow);
    }
}
