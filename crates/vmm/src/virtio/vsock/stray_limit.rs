//! Limit of packets that open connections or are of none. They are cheap for a guest and cost the
//! host a message, a reset, and time that its other guests want.

use std::time::{Duration, Instant};

/// Packets that are taken at once after a pause; a guest opens a connection when its agent greets,
/// and sends few packets of those that a restore cut.
const BURST: u32 = 256;
/// Time for each of those beyond.
const INTERVAL: Duration = Duration::from_millis(1);
/// Time for which the transmit queue rests once there are too many.
const REST: Duration = Duration::from_millis(10);

/// Limiter (generic cell rate algorithm).
#[derive(Debug)]
pub struct StrayLimit {
    burst: u32,
    /// Time up to which the packets so far are paid for.
    paid: Option<Instant>,
    rests_until: Option<Instant>,
}

impl Default for StrayLimit {
    fn default() -> Self {
        Self::new(BURST)
    }
}

impl StrayLimit {
    pub fn new(burst: u32) -> Self {
        Self {
            burst,
            paid: None,
            rests_until: None,
        }
    }

    /// Counts a packet at `now`; returns true if the queue is to rest.
    pub fn count(&mut self, now: Instant) -> bool {
        let paid = self.paid.map_or(now, |paid| paid.max(now)) + INTERVAL;
        self.paid = Some(paid);
        let is_over = paid.duration_since(now) > INTERVAL * self.burst;
        self.rests_until = is_over.then(|| now + REST);
        is_over
    }

    /// End of a rest that is not over.
    pub fn rests_until(&mut self) -> Option<Instant> {
        self.rests_until = self.rests_until.filter(|until| *until > Instant::now());
        self.rests_until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_taken_at_once_and_then_one_each_millisecond() {
        let (mut limit, now) = (StrayLimit::default(), Instant::now());
        assert!((0..BURST).all(|_| !limit.count(now)));
        assert!(limit.count(now));
        assert!(limit.rests_until().is_some());
        // Two more have been paid for.
        let later = now + INTERVAL * 2;
        assert!(!limit.count(later));
        assert!(limit.count(later));
        let after_a_pause = now + INTERVAL * BURST * 3;
        assert!((0..BURST).all(|_| !limit.count(after_a_pause)));
        assert!(limit.count(after_a_pause));
    }
}
