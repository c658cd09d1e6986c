//! Time limits of a request, which hold while it brings nothing.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Clock of one request to the store, of all its attempts.
#[derive(Debug)]
pub(crate) struct StallClock {
    attempt_limit: Duration,
    limit: Duration,
    times: Mutex<Times>,
}

#[derive(Debug)]
struct Times {
    /// Last byte of this attempt, or its beginning.
    attempt: Instant,
    /// Last byte of all attempts, or the beginning of the first.
    request: Instant,
}

impl StallClock {
    /// Starts the clock of a request that may bring nothing for `limit`, and each of its attempts
    /// for `attempt_limit`.
    pub fn new(attempt_limit: Duration, limit: Duration) -> Self {
        let now = Instant::now();
        Self {
            attempt_limit,
            limit,
            times: Mutex::new(Times {
                attempt: now,
                request: now,
            }),
        }
    }

    /// Limit of all attempts.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that bytes arrived.
    pub fn tick(&self) {
        let now = Instant::now();
        *self.times() = Times {
            attempt: now,
            request: now,
        };
    }

    /// Begins an attempt, after `waited` that does not count.
    pub fn begin_attempt(&self, waited: Duration) {
        let mut times = self.times();
        times.attempt = Instant::now();
        times.request += waited;
    }

    /// Returns when all attempts together have brought nothing for too long.
    pub async fn stalled(&self) {
        self.reached(|times| times.request + self.limit).await;
    }

    /// Returns when this attempt has brought nothing for too long.
    pub async fn attempt_stalled(&self) {
        self.quiet_for(self.attempt_limit).await;
    }

    /// Returns when this attempt has brought nothing for `time`.
    pub async fn quiet_for(&self, time: Duration) {
        self.reached(|times| times.attempt + time).await;
    }

    /// Returns when it is as late as `end` says, which later bytes postpone.
    async fn reached(&self, end: impl Fn(&Times) -> Instant) {
        loop {
            let end = end(&self.times());
            if end <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(end).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn limits_count_from_the_last_byte_and_leave_out_waits_for_others() {
        let of = Duration::from_secs;
        let clock = StallClock::new(of(3), of(5));
        let start = Instant::now();
        tokio::time::sleep(of(2)).await;
        clock.tick();
        clock.attempt_stalled().await;
        assert_eq!(start.elapsed(), of(5));
        clock.begin_attempt(of(1));
        clock.stalled().await;
        assert_eq!(start.elapsed(), of(2 + 1 + 5));
    }
}
