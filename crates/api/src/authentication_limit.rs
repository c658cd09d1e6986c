//! Limit on failed authentications from one client address, which slows down the guessing of keys.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Maximum number of failures of one address in a burst.
pub(crate) const BURST: u32 = 100;
/// Interval after which another failure is allowed: 20 in a minute.
const REFILL: Duration = Duration::from_secs(3);
/// Maximum number of addresses in the table.
const MAX_ADDRESSES: usize = 4096;

/// Recent failed authentications by client address. Each address has a bucket to which failures are
/// added and from which one failure is removed per [`REFILL`].
#[derive(Debug, Default)]
pub(crate) struct AuthenticationLimit {
    /// Recent failures by address of the client.
    buckets: Mutex<HashMap<IpAddr, Bucket>>,
}

/// Recent failures of an address.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    failures: u32,
    /// Start of the current [`REFILL`] interval.
    since: Instant,
}

impl Bucket {
    /// Returns the bucket at `now`. `None` if it contains no failures.
    fn refilled(self, now: Instant) -> Option<Self> {
        let passed = now.saturating_duration_since(self.since);
        // Count whole intervals only. The rest of the time counts for the next interval.
        let steps = u32::try_from(passed.as_millis() / REFILL.as_millis()).unwrap_or(u32::MAX);
        let failures = self.failures.checked_sub(steps).filter(|left| *left > 0)?;
        Some(Self {
            failures,
            since: self.since + REFILL * steps,
        })
    }
}

impl AuthenticationLimit {
    fn buckets(&self) -> MutexGuard<'_, HashMap<IpAddr, Bucket>> {
        self.buckets.lock()
    }

    /// Returns the time until an address at its limit may authenticate again. `None` if the address
    /// is below its limit.
    pub fn wait(&self, ip: IpAddr) -> Option<Duration> {
        self.wait_at(ip, Instant::now())
    }

    fn wait_at(&self, ip: IpAddr, now: Instant) -> Option<Duration> {
        let buckets = self.buckets();
        let bucket = buckets.get(&network(ip))?.refilled(now)?;
        // The bucket is full: it loses a failure at the end of the current interval.
        let waited = now.saturating_duration_since(bucket.since);
        (bucket.failures >= BURST).then(|| REFILL.saturating_sub(waited))
    }

    /// Counts a failed authentication.
    pub fn count(&self, ip: IpAddr) {
        self.count_at(ip, Instant::now());
    }

    /// Counts a failure of an address.
    fn count_at(&self, ip: IpAddr, now: Instant) {
        let ip = network(ip);
        let mut buckets = self.buckets();
        let bucket = buckets.get(&ip).and_then(|bucket| bucket.refilled(now));
        // Make space only for a new address.
        if bucket.is_none() && buckets.len() >= MAX_ADDRESSES && !buckets.contains_key(&ip) {
            evict(&mut buckets, now);
        }
        let mut bucket = bucket.unwrap_or(Bucket {
            failures: 0,
            since: now,
        });
        // Failures beyond the burst do not prolong the wait.
        bucket.failures = bucket.failures.saturating_add(1).min(BURST);
        buckets.insert(ip, bucket);
    }
}

/// Removes entries without failures. If there are none, removes the entry with the fewest failures,
/// and among these the oldest. An address with many failures therefore stays in the table.
fn evict(buckets: &mut HashMap<IpAddr, Bucket>, now: Instant) {
    buckets.retain(|_, bucket| bucket.refilled(now).is_some());
    if buckets.len() >= MAX_ADDRESSES {
        let first = buckets.iter().min_by_key(|(_, b)| (b.failures, b.since));
        if let Some(ip) = first.map(|(ip, _)| *ip) {
            buckets.remove(&ip);
        }
    }
}

/// Returns the address under which failures of a client are counted: for IPv6 its /64 network,
/// because a client may have 2^64 addresses.
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
    fn an_address_is_limited_to_a_burst_and_then_to_the_refill_rate() {
        let (failures, now) = (AuthenticationLimit::default(), Instant::now());
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
    fn the_table_is_bounded_and_retains_flooding_addresses() {
        let (failures, now) = (AuthenticationLimit::default(), Instant::now());
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
