//! Token bucket, represented by a time: `paid`, up to which all work is paid for. Work advances
//! this time by its duration at the bucket's rate. An idle guest saves tokens: the time lags behind
//! the current time, by at most [`BURST_WINDOW`].

use std::num::NonZeroU64;
use std::time::Duration;

/// Capacity of a bucket, as the time in which it is filled.
pub const BURST_WINDOW: Duration = Duration::from_secs(1);

/// Token bucket, initially full. Times are relative to a fixed origin, which must be at least
/// [`BURST_WINDOW`] before the first call.
#[derive(Debug)]
pub struct TokenBucket {
    per_s: NonZeroU64,
    paid: Duration,
}

impl TokenBucket {
    pub fn new(per_s: NonZeroU64) -> Self {
        Self {
            per_s,
            paid: Duration::ZERO,
        }
    }

    /// Returns the time until all work is paid for.
    pub fn wait(&self, now: Duration) -> Duration {
        self.paid.saturating_sub(now)
    }

    /// Charges `amount` at the time `now`, even if the bucket contains fewer tokens.
    pub fn take(&mut self, amount: u64, now: Duration) {
        // 128 bits: the product of an amount and a second in nanoseconds exceeds 64 bits.
        let nanos = (u128::from(amount) * 1_000_000_000).div_ceil(u128::from(self.per_s.get()));
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        // Tokens that were saved before this time are lost.
        let oldest = now.saturating_sub(BURST_WINDOW);
        self.paid = self.paid.max(oldest).saturating_add(cost);
    }
}
