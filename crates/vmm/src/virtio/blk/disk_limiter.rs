//! Rate limiter of a guest's disks: two token buckets, for bytes and for requests, shared by all
//! disks.
//!
//! A request starts when all earlier requests are paid for, independent of its own cost. At most
//! one request is therefore ahead of the rate.

use crate::virtio::token_bucket::TokenBucket;
use jiffy_proto::vm::DiskLimits;
use std::time::Duration;

/// Minimum wait. All requests that become due in this period are served by one wakeup of the event
/// loop.
const MIN_WAIT: Duration = Duration::from_millis(5);

/// Cost of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskWork {
    /// Size of the request's buffers, in bytes.
    pub bytes: u64,
    /// Number of requests to charge.
    pub requests: u64,
}

/// Token buckets of one guest. Times are relative to a fixed origin, as for a [`TokenBucket`].
#[derive(Debug)]
pub struct DiskLimiter {
    bytes: Option<TokenBucket>,
    requests: Option<TokenBucket>,
    /// Bit set of disks that had to wait and did not get precedence since.
    waiting: u64,
    /// Disk that was served last.
    last: Option<u32>,
}

impl DiskLimiter {
    /// Creates full buckets. `None` if nothing is limited.
    pub fn new(limits: DiskLimits) -> Option<Self> {
        let (bytes, requests) = (limits.bytes_per_s, limits.requests_per_s);
        (bytes.is_some() || requests.is_some()).then(|| Self {
            bytes: bytes.map(TokenBucket::new),
            requests: requests.map(TokenBucket::new),
            waiting: 0,
            last: None,
        })
    }

    /// Admits the next request of `disk` (below 64), or returns the time to wait before the next
    /// attempt. Among waiting disks, the disk that was served last yields once, so that a busy disk
    /// does not starve the others.
    pub fn admit(&mut self, disk: u32, now: Duration) -> Result<(), Duration> {
        let bit = 1u64.checked_shl(disk).unwrap_or(0);
        let buckets = self.bytes.iter().chain(&self.requests);
        // Both buckets must admit the request.
        let wait = buckets.map(|b| b.wait(now)).max().unwrap_or_default();
        if !wait.is_zero() {
            self.waiting |= bit;
            return Err(wait.max(MIN_WAIT));
        }
        // Another disk waits, and this disk had the last turn: yield once. Clear the set of waiting
        // disks, because a disk in the set may have been reset and will not return.
        if self.waiting & !bit != 0 && self.last == Some(disk) {
            self.waiting = 0;
            self.last = None;
            return Err(MIN_WAIT);
        }
        self.waiting &= !bit;
        self.last = Some(disk);
        Ok(())
    }

    /// Charges the buckets for a request.
    pub fn charge(&mut self, work: DiskWork, now: Duration) {
        if let Some(bucket) = &mut self.bytes {
            bucket.take(work.bytes, now);
        }
        if let Some(bucket) = &mut self.requests {
            bucket.take(work.requests, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::token_bucket::BURST_WINDOW;
    use std::num::NonZeroU64;

    const MIB: u64 = 1 << 20;

    fn limiter(bytes_per_s: u64, requests_per_s: u64) -> DiskLimiter {
        DiskLimiter::new(DiskLimits {
            bytes_per_s: NonZeroU64::new(bytes_per_s),
            requests_per_s: NonZeroU64::new(requests_per_s),
        })
        .unwrap()
    }

    fn request(bytes: u64) -> DiskWork {
        DiskWork { bytes, requests: 1 }
    }

    /// Simulates a disk that is never idle from `now` to `end`. Returns the number of served
    /// requests.
    fn busy(
        limiter: &mut DiskLimiter,
        disk: u32,
        bytes: u64,
        mut now: Duration,
        end: Duration,
    ) -> u64 {
        let mut served = 0;
        while now < end {
            match limiter.admit(disk, now) {
                Ok(()) => {
                    limiter.charge(request(bytes), now);
                    served += 1;
                }
                Err(wait) => now += wait,
            }
        }
        served
    }

    #[test]
    fn without_limits_no_limiter_is_created() {
        assert!(DiskLimiter::new(DiskLimits::default()).is_none());
    }

    #[test]
    fn an_idle_guest_saves_tokens_of_at_most_one_second() {
        for rest in [0, 1, 3600] {
            let mut limiter = limiter(10 * MIB, 0);
            let now = BURST_WINDOW + Duration::from_secs(rest);
            let mut served = 0;
            while limiter.admit(0, now).is_ok() {
                limiter.charge(request(MIB), now);
                served += 1;
            }
            // The last request is ahead of the rate.
            assert_eq!(served, 11);
        }
    }

    #[test]
    fn a_busy_disk_reaches_the_rate() {
        let seconds = 100;
        let end = BURST_WINDOW + Duration::from_secs(seconds);
        // 10 requests per second, 10 from the full bucket, and one ahead of the rate.
        let by_bytes = busy(&mut limiter(10 * MIB, 0), 0, MIB, BURST_WINDOW, end);
        assert!((1009..=1012).contains(&by_bytes), "{by_bytes}");
        let by_requests = busy(&mut limiter(0, 50), 0, MIB, BURST_WINDOW, end);
        assert!((5049..=5052).contains(&by_requests), "{by_requests}");
        // The tighter of the two limits applies.
        let by_both = busy(&mut limiter(10 * MIB, 5), 0, MIB, BURST_WINDOW, end);
        assert!((504..=507).contains(&by_both), "{by_both}");
    }

    #[test]
    fn a_request_larger_than_the_bucket_is_served_and_paid_for_afterwards() {
        let mut limiter = limiter(MIB, 0);
        assert_eq!(limiter.admit(0, BURST_WINDOW), Ok(()));
        limiter.charge(request(4 * MIB), BURST_WINDOW);
        assert_eq!(limiter.admit(0, BURST_WINDOW), Err(Duration::from_secs(3)));
        assert_eq!(
            limiter.admit(0, BURST_WINDOW + Duration::from_secs(3)),
            Ok(())
        );
    }

    #[test]
    fn the_minimum_wait_is_some_milliseconds() {
        let mut limiter = limiter(1 << 40, 0);
        limiter.charge(request((1 << 40) + 1), BURST_WINDOW);
        assert_eq!(limiter.admit(0, BURST_WINDOW), Err(MIN_WAIT));
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let mut limiter = limiter(1, u64::MAX);
        limiter.charge(request(u64::MAX), BURST_WINDOW);
        limiter.charge(request(u64::MAX), BURST_WINDOW);
        assert!(limiter.admit(0, BURST_WINDOW).is_err());
    }

    #[test]
    fn a_busy_disk_does_not_starve_another_disk() {
        let mut limiter = limiter(MIB, 0);
        let mut now = BURST_WINDOW;
        // Times of the next attempts. The first disk always tries first.
        let mut back = [now; 2];
        let mut served = [0u64; 2];
        while now < Duration::from_secs(60) {
            for disk in 0..2u32 {
                let at = usize::try_from(disk).unwrap();
                while back[at] <= now {
                    match limiter.admit(disk, now) {
                        Ok(()) => {
                            limiter.charge(request(MIB / 4), now);
                            served[at] += 1;
                        }
                        Err(wait) => back[at] = now + wait,
                    }
                }
            }
            now += Duration::from_millis(1);
        }
        let [first, second] = served;
        assert!(second * 3 > first && first * 3 > second, "{served:?}");
    }

    #[test]
    fn a_waiting_disk_that_was_removed_does_not_block_others() {
        let mut limiter = limiter(MIB, 0);
        limiter.charge(request(2 * MIB), BURST_WINDOW);
        assert!(limiter.admit(0, BURST_WINDOW).is_err());
        let end = BURST_WINDOW + Duration::from_secs(20);
        let served = busy(&mut limiter, 1, MIB, BURST_WINDOW, end);
        assert!((19..=20).contains(&served), "{served}");
    }
}
