//! [`RateLimiter`]: limits the rate of a guest's DNS questions. After a pause, a burst is
//! permitted.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Rate limiter (generic cell rate algorithm).
#[derive(Debug)]
pub(crate) struct RateLimiter {
    /// Maximum size of a burst.
    burst: u32,
    /// Time at which the burst is fully available again.
    next: Mutex<Option<Instant>>,
}

impl RateLimiter {
    /// Creates a limiter that permits bursts of `burst` events.
    pub fn new(burst: u32) -> Self {
        Self {
            burst,
            next: Mutex::new(None),
        }
    }

    /// Registers an event at `now` and returns its delay, for a rate of one event per `interval`.
    pub fn delay(&self, now: Instant, interval: Duration) -> Duration {
        let mut next = self.next.lock();
        let due = next.map_or(now, |next| next.max(now));
        // `due` advances by one interval per event. The events of a full burst do not wait: an
        // event waits only if `due` is more than `burst - 1` intervals ahead of the present.
        *next = Some(due + interval);
        due.duration_since(now)
            .saturating_sub(interval * self.burst.saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_free_and_later_ones_wait() {
        let (pace, now) = (RateLimiter::new(3), Instant::now());
        let interval = Duration::from_millis(10);
        let delays = |count: u32, now| -> Vec<u128> {
            let all = (0..count).map(|_| pace.delay(now, interval).as_millis());
            all.collect()
        };
        assert_eq!(delays(5, now), [0, 0, 0, 10, 20]);
        // After a pause, one burst is available again.
        assert_eq!(delays(4, now + Duration::from_secs(1)), [0, 0, 0, 10]);
        // A longer interval applies immediately.
        let slow = Duration::from_secs(1);
        let later = now + Duration::from_secs(60);
        for _ in 0..3 {
            assert_eq!(pace.delay(later, slow), Duration::ZERO);
        }
        assert_eq!(pace.delay(later, slow), slow);
    }
}
