//! [`ClockCorrection`]: correction of a guest's wall clock after its identity was applied.
//!
//! The identity contains the time of the host. The guest's clock is behind by the duration of the
//! transfer: a fraction of a millisecond, or many milliseconds if the guest had to wait for a
//! processor. In the second case the host reads the guest's clock, as NTP does, until the error is
//! known well enough. Then the agent changes the clock.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Error of a guest's clock that is not corrected, in nanoseconds.
const ACCEPTED_ERROR_NS: i64 = 3_000_000;
/// Maximum number of readings before the clock is changed.
const MAX_READINGS: usize = 4;

/// Time of the host's wall clock, and of the monotonic clock at the same moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostTime {
    since_epoch_ns: u64,
    at: Instant,
}

impl HostTime {
    /// Returns the current time. `None` if the host's clock is not between 1970 and 2554.
    pub fn now() -> Option<Self> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
        Some(Self {
            // 64 bits of nanoseconds since 1970 last until 2554.
            since_epoch_ns: u64::try_from(since_epoch.as_nanos()).ok()?,
            at: Instant::now(),
        })
    }

    /// Returns the nanoseconds since 1970.
    pub fn since_epoch_ns(self) -> u64 {
        self.since_epoch_ns
    }

    /// Returns the time that has passed since.
    pub fn elapsed(self) -> Duration {
        self.at.elapsed()
    }
}

/// State of a correction. The error of the guest's clock is the guest's time minus the host's time.
#[derive(Debug)]
pub(crate) struct ClockCorrection {
    /// Minimum and maximum of the error in nanoseconds.
    error_ns: (i64, i64),
    readings: usize,
    is_complete: bool,
}

impl ClockCorrection {
    /// Starts a correction after a transfer of the identity that took at most `transfer`.
    pub fn after_transfer(transfer: Duration) -> Self {
        let behind_ns = i64::try_from(transfer.as_nanos()).unwrap_or(i64::MAX);
        Self {
            error_ns: (-behind_ns, 0),
            readings: 0,
            is_complete: false,
        }
    }

    /// Returns the next change of the guest's clock in nanoseconds: 0 for a reading without a
    /// change. `None` if the correction is complete.
    pub fn next_step(&self) -> Option<i64> {
        let (low, high) = self.error_ns;
        if self.is_complete || (low >= -ACCEPTED_ERROR_NS && high <= ACCEPTED_ERROR_NS) {
            return None;
        }
        // If the clock is changed by the middle of the bounds, its error is at most `half`.
        // Readings are repeated until `half` is at most half of the accepted error.
        let half = high.saturating_sub(low) / 2;
        if half > ACCEPTED_ERROR_NS / 2 && self.readings < MAX_READINGS {
            return Some(0);
        }
        let middle = low.saturating_add(half);
        (middle != 0).then_some(middle.saturating_neg())
    }

    /// Records the guest's time after a change by `step_ns`, which was requested at `sent`.
    pub fn on_reading(&mut self, step_ns: i64, sent: HostTime, guest_ns: u64) {
        self.add_reading(step_ns, sent.since_epoch_ns, sent.elapsed(), guest_ns);
    }

    /// Narrows the bounds of the clock's error by a reading of the guest's clock after a step of
    /// `step_ns`.
    fn add_reading(&mut self, step_ns: i64, sent_ns: u64, round_trip: Duration, guest_ns: u64) {
        // The guest read its clock between the request and the response.
        let latest = i128::from(guest_ns) - i128::from(sent_ns);
        let latest = i64::try_from(latest).unwrap_or(i64::MAX);
        let round_trip_ns = i64::try_from(round_trip.as_nanos()).unwrap_or(i64::MAX);
        let earliest = latest.saturating_sub(round_trip_ns);
        self.readings += 1;
        let low = self.error_ns.0.saturating_add(step_ns).max(earliest);
        let high = self.error_ns.1.saturating_add(step_ns).min(latest);
        self.error_ns = (low, high);
        // A reading that contradicts the others has no meaning: the host's clock was set, or the
        // guest does not report its clock.
        self.is_complete = step_ns != 0 || low > high;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENT_NS: u64 = 1_800_000_000_000_000_000;
    const MS: i64 = 1_000_000;

    /// Corrects a clock with an error of `error_ns`. Each exchange takes `round_trips_ms` in turn,
    /// and the guest reads its clock at its end. Returns the remaining error.
    fn correct(transfer_ms: u64, mut error_ns: i64, round_trips_ms: &[u64]) -> i64 {
        let transfer = Duration::from_millis(transfer_ms);
        let mut correction = ClockCorrection::after_transfer(transfer);
        let mut round_trips_ms = round_trips_ms.iter();
        while let Some(step_ns) = correction.next_step() {
            let round_trip = Duration::from_millis(*round_trips_ms.next().unwrap());
            error_ns += step_ns;
            let round_trip_ns = i64::try_from(round_trip.as_nanos()).unwrap();
            let guest_ns = SENT_NS.saturating_add_signed(round_trip_ns + error_ns);
            correction.add_reading(step_ns, SENT_NS, round_trip, guest_ns);
        }
        assert!(round_trips_ms.next().is_none(), "fewer exchanges");
        error_ns
    }

    #[test]
    fn a_short_transfer_is_not_corrected() {
        assert_eq!(correct(3, -2 * MS, &[]), -2 * MS);
    }

    #[test]
    fn a_late_clock_is_right_after_one_fast_reading() {
        assert!(correct(20, -18 * MS, &[1, 1]).abs() <= MS);
        assert!(correct(20, -MS, &[1]).abs() <= MS);
    }

    #[test]
    fn slow_readings_are_repeated_and_limited() {
        assert!(correct(20, -15 * MS, &[40, 10, 2, 30]).abs() <= 3 * MS);
        // The error is at most half of the shortest round trip.
        assert!(correct(60, -50 * MS, &[20, 16, 18, 30, 20]).abs() <= 8 * MS);
    }

    #[test]
    fn readings_without_meaning_end_the_correction_without_a_change() {
        let mut correction = ClockCorrection::after_transfer(Duration::from_millis(20));
        assert_eq!(correction.next_step(), Some(0));
        correction.add_reading(0, SENT_NS, Duration::from_millis(1), 0);
        assert_eq!(correction.next_step(), None);
    }
}
