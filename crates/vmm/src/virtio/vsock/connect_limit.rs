//! Limit of the connections that a guest requests. Requests are cheap for the guest, but cost the
//! host a message or a reset, and time that other guests need. Connections of the host do not
//! count.

use super::MAX_CONNECTIONS;
use crate::virtio::token_bucket::{BURST_WINDOW, TokenBucket};
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// Maximum number of requests per second, and of consecutive requests after an idle second: the
/// maximum number of connections. An agent sends one request for its greeting.
const PER_S: NonZeroU64 = NonZeroU64::MIN.saturating_add(MAX_CONNECTIONS as u64 - 1);
/// Time for which the transmit queue is not served after too many requests.
const PAUSE: Duration = Duration::from_millis(10);

/// Limits the rate of connection requests of a guest.
#[derive(Debug)]
pub struct ConnectLimit {
    bucket: TokenBucket,
    began: Instant,
    paused_until: Option<Instant>,
}

impl Default for ConnectLimit {
    fn default() -> Self {
        Self::new(PER_S)
    }
}

impl ConnectLimit {
    pub fn new(per_s: NonZeroU64) -> Self {
        Self {
            bucket: TokenBucket::new(per_s),
            began: Instant::now(),
            paused_until: None,
        }
    }

    /// Counts a request at `now`. Returns whether the queue must be paused.
    pub fn count(&mut self, now: Instant) -> bool {
        // A bucket requires an origin at least `BURST_WINDOW` before the first call.
        let since = now.duration_since(self.began) + BURST_WINDOW;
        // Charge before checking: a request above the rate is still served, but pauses the queue.
        self.bucket.take(1, since);
        let is_over = !self.bucket.wait(since).is_zero();
        self.paused_until = is_over.then(|| now + PAUSE);
        is_over
    }

    /// Returns the end of the current pause. `None` if the queue is not paused.
    pub fn paused_until(&mut self) -> Option<Instant> {
        // Drop a pause that has ended.
        self.paused_until = self.paused_until.filter(|until| *until > Instant::now());
        self.paused_until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_accepted_at_once_and_then_one_request_per_interval() {
        let mut limit = ConnectLimit::default();
        let now = limit.began;
        // A request costs 1/1024 s, rounded up to nanoseconds. Therefore the last request of a full
        // burst may already be above the rate.
        let (burst, interval) = (PER_S.get() - 1, Duration::from_secs(1) / 1000);
        assert!((0..burst).all(|_| !limit.count(now)));
        assert!((0..2).any(|_| limit.count(now)));
        assert!(limit.paused_until().is_some());
        let later = now + interval * 3;
        let free = (0..10).take_while(|_| !limit.count(later)).count();
        assert!((1..=3).contains(&free), "{free}");
        let after_a_pause = now + Duration::from_secs(3);
        assert!((0..burst).all(|_| !limit.count(after_a_pause)));
        assert!((0..2).any(|_| limit.count(after_a_pause)));
    }
}
