//! Limit of failed joins, at the member that admits hosts: tokens cannot be guessed at a high rate.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Period of the limits.
const PERIOD: Duration = Duration::from_secs(60);
/// Maximum number of failures of one address.
const MAX_PER_ADDRESS: usize = 10;
/// Maximum number of failures of all addresses.
const MAX_TOTAL: usize = 200;

/// Failed joins of the last minute.
#[derive(Debug, Default)]
pub(super) struct Attempts(VecDeque<(Instant, IpAddr)>);

impl Attempts {
    /// Returns whether another join of an address is permitted.
    pub(super) fn permits(&mut self, from: IpAddr, now: Instant) -> bool {
        while let Some((at, _)) = self.0.front()
            && now.saturating_duration_since(*at) >= PERIOD
        {
            self.0.pop_front();
        }
        let of_address = self.0.iter().filter(|(_, other)| *other == from).count();
        self.0.len() < MAX_TOTAL && of_address < MAX_PER_ADDRESS
    }

    /// Counts a failure.
    pub(super) fn failed(&mut self, from: IpAddr, now: Instant) {
        self.0.push_back((now, from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_limited_per_address_and_in_total_for_a_minute() {
        let mut attempts = Attempts::default();
        let start = Instant::now();
        let address = |n: u8| IpAddr::from([10, 0, 0, n]);
        for _ in 0..MAX_PER_ADDRESS {
            assert!(attempts.permits(address(1), start));
            attempts.failed(address(1), start);
        }
        assert!(!attempts.permits(address(1), start));
        assert!(attempts.permits(address(2), start));
        for n in 0..MAX_TOTAL {
            attempts.failed(address(n as u8), start);
        }
        assert!(!attempts.permits(address(250), start));
        assert!(attempts.permits(address(1), start + PERIOD));
    }
}
