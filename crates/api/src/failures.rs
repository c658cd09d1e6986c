//! Limit on failed authentications of one client address.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Failures of one address at once.
pub(crate) const BURST: u32 = 100;
/// Time after which one more is allowed: 20 in a minute.
const REFILL: Duration = Duration::from_secs(3);
/// Addresses that are remembered.
const MAX_ADDRESSES: usize = 4096;

/// Failed authentications by client address.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    buckets: Mutex<HashMap<IpAddr, Bucket>>,
}

/// Failures that an address has made lately.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    failures: u32,
    /// Moment from which [`REFILL`] is counted.
    since: Instant,
}

impl Bucket {
    /// The bucket at `now`; none if it is as good as new.
    fn refilled(self, now: Instant) -> Option<Self> {
        let passed = now.saturating_duration_since(self.since);
        let steps = u32::try_from(passed.as_millis() / REFILL.as_millis()).unwrap_or(u32::MAX);
        let failures = self.failures.checked_sub(steps).filter(|left| *left > 0)?;
        Some(Self {
            failures,
            since: self.since + REFILL * steps,
        })
    }
}

impl Failures {
    fn buckets(&self) -> MutexGuard<'_, HashMap<IpAddr, Bucket>> {
        self.buckets.lock()
    }

    /// Time that an address at its limit has to wait; none if it is below.
    pub fn wait(&self, ip: IpAddr) -> Option<Duration> {
        self.wait_at(ip, Instant::now())
    }

    fn wait_at(&self, ip: IpAddr, now: Instant) -> Option<Duration> {
        let buckets = self.buckets();
        let bucket = buckets.get(&network(ip))?.refilled(now)?;
        let waited = now.saturating_duration_since(bucket.since);
        (bucket.failures >= BURST).then(|| REFILL.saturating_sub(waited))
    }

    /// Counts a failure.
    pub fn count(&self, ip: IpAddr) {
        self.count_at(ip, Instant::now());
    }

    fn count_at(&self, ip: IpAddr, now: Instant) {
        let ip = network(ip);
        let mut buckets = self.buckets();
        let known = buckets.get(&ip).and_then(|bucket| bucket.refilled(now));
        if known.is_none() && buckets.len() >= MAX_ADDRESSES && !buckets.contains_key(&ip) {
            make_room(&mut buckets, now);
        }
        let mut bucket = known.unwrap_or(Bucket {
            failures: 0,
            since: now,
        });
        bucket.failures = bucket.failures.saturating_add(1).min(BURST);
        buckets.insert(ip, bucket);
    }
}

/// Removes entries that are as good as new, else the one that made the fewest failures, else the
/// oldest of these: an address that floods is not forgotten because of others.
fn make_room(buckets: &mut HashMap<IpAddr, Bucket>, now: Instant) {
    buckets.retain(|_, bucket| bucket.refilled(now).is_some());
    if buckets.len() >= MAX_ADDRESSES {
        let least = buckets.iter().min_by_key(|(_, b)| (b.failures, b.since));
        if let Some(ip) = least.map(|(ip, _)| *ip) {
            buckets.remove(&ip);
        }
    }
}

/// Client that an address stands for: of IPv6, a network of 2^64 addresses.
fn network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from(u128::from(ip) & !u128::from(u64::MAX)).into(),
        ip @ IpAddr::V4(_) => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_address_fails_so_often_and_then_at_the_rate_of_the_refill() {
        let (failures, now) = (Failures::default(), Instant::now());
        let client = ip("2001:db8::1");
        for _ in 0..BURST {
            assert_eq!(failures.wait_at(client, now), None);
            failures.count_at(client, now);
        }
        assert_eq!(failures.wait_at(ip("2001:db8::ffff"), now), Some(REFILL));
        assert_eq!(failures.wait_at(ip("2001:db8:0:1::1"), now), None);
        // Further failures do not prolong the wait.
        failures.count_at(client, now);
        let later = now + REFILL;
        assert_eq!(failures.wait_at(client, later), None);
        failures.count_at(client, later);
        assert_eq!(failures.wait_at(client, later), Some(REFILL));
        let hour = now + Duration::from_secs(3600);
        assert_eq!(failures.wait_at(client, hour), None);
    }

    #[test]
    fn the_table_is_bounded_and_keeps_those_that_flood() {
        let (failures, now) = (Failures::default(), Instant::now());
        let flooding = ip("192.0.2.1");
        for _ in 0..BURST {
            failures.count_at(flooding, now);
        }
        for n in 0..3 * MAX_ADDRESSES as u32 {
            failures.count_at(IpAddr::from((0x0a00_0000 + n).to_be_bytes()), now);
        }
        assert!(failures.buckets().len() <= MAX_ADDRESSES);
        assert!(failures.wait_at(flooding, now).is_some());
    }
}
