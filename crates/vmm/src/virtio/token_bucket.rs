//! Token bucket, stored as the time up to which its work is paid for. Work advances that time by
//! its duration at the bucket's rate. The time lags behind by at most [`BURST_WINDOW`], the tokens
//! that an idle guest saves up.

use std::num::NonZeroU64;
use std::time::Duration;

/// Capacity of a bucket, as the time in which it fills.
pub const BURST_WINDOW: Duration = Duration::from_secs(1);

/// Bucket, full at first. Times are relative to a fixed origin, which lies [`BURST_WINDOW`] or more
/// before the first call.
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

    /// Time until everything taken is paid for.
    pub fn wait(&self, now: Duration) -> Duration {
        self.paid.saturating_sub(now)
    }

    pub fn take(&mut self, amount: u64, now: Duration) {
        let nanos = (u128::from(amount) * 1_000_000_000).div_ceil(u128::from(self.per_s.get()));
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let oldest = now.saturating_sub(BURST_WINDOW);
        self.paid = self.paid.max(oldest).saturating_add(cost);
    }
}
