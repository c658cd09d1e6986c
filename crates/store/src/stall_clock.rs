//! [`StallClock`]: time limits of a request to the store. One limit is the time without a received
//! byte. The other limit is the total time relative to the number of received bytes.

use parking_lot::{Mutex, MutexGuard};
use std::time::Duration;
use tokio::time::Instant;

/// Clock of one request to the store over all its attempts.
#[derive(Debug)]
pub(crate) struct StallClock {
    /// Maximum time without a received byte in one attempt.
    attempt_limit: Duration,
    /// Maximum time without a received byte over all attempts.
    limit: Duration,
    times: Mutex<Times>,
}

/// Times of a request.
#[derive(Debug)]
struct Times {
    /// Time of the last byte of this attempt, or the start of the attempt.
    attempt: Instant,
    /// Time of the last byte of any attempt, or the start of the first.
    request: Instant,
    /// Time at which the request fails although bytes arrive. Received bytes postpone it by the
    /// time that [`StallClock::tick`] adds.
    end: Instant,
}

impl StallClock {
    /// Starts the clock of a request. `limit` is the maximum time without a received byte over all
    /// attempts, `attempt_limit` the maximum per attempt.
    pub fn new(attempt_limit: Duration, limit: Duration) -> Self {
        let now = Instant::now();
        Self {
            attempt_limit,
            limit,
            times: Mutex::new(Times {
                attempt: now,
                request: now,
                end: now + limit,
            }),
        }
    }

    /// Returns the limit over all attempts.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock()
    }

    /// Records progress, which extends the total time by `time`.
    pub fn tick(&self, time: Duration) {
        let now = Instant::now();
        let mut times = self.times();
        times.attempt = now;
        times.request = now;
        times.end += time;
    }

    /// Extends all limits by `waited`, time that this host caused.
    pub fn excuse(&self, waited: Duration) {
        let mut times = self.times();
        times.attempt += waited;
        times.request += waited;
        times.end += waited;
    }

    /// Starts an attempt. `waited` is the time before the attempt that this host caused, and does
    /// not count.
    pub fn begin_attempt(&self, waited: Duration) {
        let mut times = self.times();
        times.attempt = Instant::now();
        times.request += waited;
        times.end += waited;
    }

    /// Waits until all attempts together have stalled or are too slow.
    pub async fn stalled(&self) {
        self.reached(|times| times.end.min(times.request + self.limit))
            .await;
    }

    /// Waits until this attempt has stalled.
    pub async fn attempt_stalled(&self) {
        self.quiet_for(self.attempt_limit).await;
    }

    /// Waits until this attempt has received no byte for `time`.
    pub async fn quiet_for(&self, time: Duration) {
        self.reached(|times| times.attempt + time).await;
    }

    /// Waits until the time that `end` returns. Received bytes may postpone it.
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
        clock.tick(of(60));
        clock.attempt_stalled().await;
        assert_eq!(start.elapsed(), of(5));
        clock.begin_attempt(of(1));
        clock.stalled().await;
        assert_eq!(start.elapsed(), of(2 + 1 + 5));
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_that_arrive_one_at_a_time_do_not_postpone_the_end() {
        let of = Duration::from_secs;
        let clock = StallClock::new(of(3), of(5));
        let start = Instant::now();
        let trickle = async {
            loop {
                tokio::time::sleep(of(1)).await;
                clock.tick(Duration::from_millis(1));
            }
        };
        tokio::select! {
            () = trickle => {}
            () = clock.stalled() => {}
        }
        assert!(start.elapsed() < of(6), "{:?}", start.elapsed());
    }
}
