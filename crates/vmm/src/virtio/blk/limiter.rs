//! How fast a guest may use its disks: two token buckets, for bytes and for requests, that all its disks share.
//!
//! A bucket is kept as the moment up to which its work is paid for. Work moves that moment on by the time that it takes at the
//! bucket's rate, and it never lags behind by more than [`BURST`]: that is what an idle guest saves up. A request begins when
//! everything is paid for, whatever it will cost, so one request at most is ahead of the rate.

use jiffy_proto::vm::DiskLimits;
use std::num::NonZeroU64;
use std::time::Duration;

/// So much time's worth of work may be done at once after a rest.
pub const BURST: Duration = Duration::from_secs(1);
/// Nobody is told to wait for less: the requests of this time are then served together, by one turn of the event loop.
const LEAST_WAIT: Duration = Duration::from_millis(5);

/// What a request took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes that it named.
    pub bytes: u64,
    /// As how many requests it counts.
    pub requests: u64,
}

#[derive(Debug)]
struct Bucket {
    per_s: NonZeroU64,
    paid: Duration,
}

impl Bucket {
    fn wait(&self, now: Duration) -> Duration {
        self.paid.saturating_sub(now)
    }

    fn take(&mut self, amount: u64, now: Duration) {
        let nanos = (u128::from(amount) * 1_000_000_000).div_ceil(u128::from(self.per_s.get()));
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let oldest = now.saturating_sub(BURST);
        self.paid = self.paid.max(oldest).saturating_add(cost);
    }
}

/// The buckets of one guest. Time is what passed since some moment, which is the same for all calls and lies [`BURST`] or more
/// before the first of them.
#[derive(Debug)]
pub struct Limiter {
    bytes: Option<Bucket>,
    requests: Option<Bucket>,
    /// Disks, as bits, that were refused since somebody made room for them.
    waiting: u64,
    /// Who was served last.
    last: Option<u32>,
}

impl Limiter {
    /// Full buckets; none if nothing is limited.
    pub fn new(limits: DiskLimits) -> Option<Self> {
        let bucket = |per_s| Bucket {
            per_s,
            paid: Duration::ZERO,
        };
        let (bytes, requests) = (limits.bytes_per_s, limits.requests_per_s);
        (bytes.is_some() || requests.is_some()).then(|| Self {
            bytes: bytes.map(bucket),
            requests: requests.map(bucket),
            waiting: 0,
            last: None,
        })
    }

    /// Whether `disk` (below 64) may serve its next request; else how long it has to wait before it asks again. Of several that
    /// wait the one that was served last stands back once, so that a disk that is never idle does not keep the others waiting.
    pub fn admit(&mut self, disk: u32, now: Duration) -> Result<(), Duration> {
        let own = 1u64.checked_shl(disk).unwrap_or(0);
        let buckets = self.bytes.iter().chain(&self.requests);
        let wait = buckets.map(|b| b.wait(now)).max().unwrap_or_default();
        if !wait.is_zero() {
            self.waiting |= own;
            return Err(wait.max(LEAST_WAIT));
        }
        if self.waiting & !own != 0 && self.last == Some(disk) {
            self.waiting = 0;
            self.last = None;
            return Err(LEAST_WAIT);
        }
        self.waiting &= !own;
        self.last = Some(disk);
        Ok(())
    }

    /// Charges for what was done.
    pub fn charge(&mut self, work: Work, now: Duration) {
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

    const MIB: u64 = 1 << 20;

    fn limiter(bytes_per_s: u64, requests_per_s: u64) -> Limiter {
        Limiter::new(DiskLimits {
            bytes_per_s: NonZeroU64::new(bytes_per_s),
            requests_per_s: NonZeroU64::new(requests_per_s),
        })
        .unwrap()
    }

    fn request(bytes: u64) -> Work {
        Work { bytes, requests: 1 }
    }

    /// A disk that never rests, from `now` to `end`: how many requests it was served.
    fn busy(limiter: &mut Limiter, disk: u32, bytes: u64, mut now: Duration, end: Duration) -> u64 {
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
    fn nothing_is_counted_where_nothing_is_limited() {
        assert!(Limiter::new(DiskLimits::default()).is_none());
    }

    #[test]
    fn a_rested_guest_gets_a_second_s_worth_at_once_and_no_more() {
        for rest in [0, 1, 3600] {
            let mut limiter = limiter(10 * MIB, 0);
            let now = BURST + Duration::from_secs(rest);
            let mut served = 0;
            while limiter.admit(0, now).is_ok() {
                limiter.charge(request(MIB), now);
                served += 1;
            }
            // The last one is ahead.
            assert_eq!(served, 11);
        }
    }

    #[test]
    fn whoever_never_rests_gets_the_rate() {
        let seconds = 100;
        let end = BURST + Duration::from_secs(seconds);
        let by_bytes = busy(&mut limiter(10 * MIB, 0), 0, MIB, BURST, end);
        assert!((1009..=1012).contains(&by_bytes), "{by_bytes}");
        let by_requests = busy(&mut limiter(0, 50), 0, MIB, BURST, end);
        assert!((5049..=5052).contains(&by_requests), "{by_requests}");
        // Of two limits the tighter one.
        let by_both = busy(&mut limiter(10 * MIB, 5), 0, MIB, BURST, end);
        assert!((504..=507).contains(&by_both), "{by_both}");
    }

    #[test]
    fn a_request_larger_than_the_bucket_is_served_and_paid_for_afterwards() {
        let mut limiter = limiter(MIB, 0);
        assert_eq!(limiter.admit(0, BURST), Ok(()));
        limiter.charge(request(4 * MIB), BURST);
        assert_eq!(limiter.admit(0, BURST), Err(Duration::from_secs(3)));
        assert_eq!(limiter.admit(0, BURST + Duration::from_secs(3)), Ok(()));
    }

    #[test]
    fn nobody_is_woken_for_less_than_some_milliseconds() {
        let mut limiter = limiter(1 << 40, 0);
        limiter.charge(request((1 << 40) + 1), BURST);
        assert_eq!(limiter.admit(0, BURST), Err(LEAST_WAIT));
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let mut limiter = limiter(1, u64::MAX);
        limiter.charge(request(u64::MAX), BURST);
        limiter.charge(request(u64::MAX), BURST);
        assert!(limiter.admit(0, BURST).is_err());
    }

    #[test]
    fn a_disk_that_is_never_idle_does_not_keep_another_one_waiting() {
        let mut limiter = limiter(MIB, 0);
        let mut now = BURST;
        // When each comes back; the first one always has the better place.
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
    fn a_disk_that_went_away_while_it_waited_holds_nobody_up_for_long() {
        let mut limiter = limiter(MIB, 0);
        limiter.charge(request(2 * MIB), BURST);
        assert!(limiter.admit(0, BURST).is_err());
        let end = BURST + Duration::from_secs(20);
        let served = busy(&mut limiter, 1, MIB, BURST, end);
        assert!((19..=20).contains(&served), "{served}");
    }
}
