//! [`UsageAmounts`]: usage of an owner in a period.
//!
//! The period is a day, or the time of one measurement.

use super::Day;

/// Milliseconds of a day.
pub(super) const DAY_MS: u64 = 24 * 3600 * 1000;
/// Maximum number of days over which one measurement is distributed.
const MAX_SPAN_DAYS: u64 = 400;

/// Amounts that an owner has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageAmounts {
    /// Time of running sandboxes in milliseconds.
    pub sandbox_ms: u64,
    /// Processor time of running sandboxes in microseconds.
    pub cpu_us: u64,
    /// Memory size of running sandboxes in MiB, times milliseconds.
    pub memory_mib_ms: u64,
    /// Disk space in KiB, times seconds.
    pub stored_kib_s: u64,
    /// Maximum disk space in bytes.
    pub max_stored_bytes: u64,
    /// Bytes that sandboxes have sent.
    pub sent_bytes: u64,
    /// Completed requests to functions.
    pub function_requests: u64,
}

impl UsageAmounts {
    /// Adds the amounts of the same day.
    pub fn add(&mut self, other: &Self) {
        for (sum, more) in self.sums().into_iter().zip(other.clone().sums()) {
            *sum = sum.saturating_add(*more);
        }
        self.max_stored_bytes = self.max_stored_bytes.max(other.max_stored_bytes);
    }

    /// Returns whether nothing was used.
    pub fn is_zero(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the amounts that add up over time, which are all except the maximum of the disk
    /// space. [`Self::by_day`] assumes that they accrued at a constant rate during the period.
    fn sums(&mut self) -> [&mut u64; 6] {
        [
            &mut self.sandbox_ms,
            &mut self.cpu_us,
            &mut self.memory_mib_ms,
            &mut self.stored_kib_s,
            &mut self.sent_bytes,
            &mut self.function_requests,
        ]
    }

    /// Distributes the amounts over the days from `start_ms` to `end_ms`, in milliseconds since
    /// 1970. The parts add up to the amounts.
    pub(super) fn by_day(self, start_ms: u64, end_ms: u64) -> Vec<(Day, Self)> {
        let start_ms = start_ms.clamp(end_ms.saturating_sub(MAX_SPAN_DAYS * DAY_MS), end_ms);
        let (first, last) = (start_ms / DAY_MS, end_ms / DAY_MS);
        if first == last {
            return vec![(Day::at(end_ms), self)];
        }
        let total = u128::from(end_ms - start_ms);
        // The part of an amount that was used until `elapsed`.
        let until = |amount: u64, elapsed: u128| {
            u64::try_from(u128::from(amount) * elapsed / total).unwrap_or(u64::MAX)
        };
        let mut parts = Vec::new();
        let mut from = 0;
        for day in first..=last {
            let to = u128::from(((day + 1) * DAY_MS).min(end_ms) - start_ms);
            let mut part = self;
            for amount in part.sums() {
                *amount = until(*amount, to) - until(*amount, from);
            }
            from = to;
            parts.push((Day::at(day * DAY_MS), part));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_days_add_up_to_the_whole() {
        let amounts = UsageAmounts {
            sandbox_ms: 3 * DAY_MS,
            cpu_us: 1_000_001,
            function_requests: 7,
            max_stored_bytes: 9,
            ..UsageAmounts::default()
        };
        let start = 10 * DAY_MS + DAY_MS / 2;
        let parts = amounts.by_day(start, start + 3 * DAY_MS);
        let days: Vec<u32> = parts.iter().map(|(day, _)| day.0).collect();
        assert_eq!(days, [10, 11, 12, 13]);
        assert_eq!(parts[0].1.sandbox_ms, DAY_MS / 2);
        assert_eq!(parts[1].1.sandbox_ms, DAY_MS);
        let mut sum = UsageAmounts::default();
        parts.iter().for_each(|(_, part)| sum.add(part));
        assert_eq!(sum, amounts);
    }

    #[test]
    fn a_period_of_any_length_has_a_bounded_number_of_parts() {
        let amounts = UsageAmounts {
            cpu_us: u64::MAX,
            ..UsageAmounts::default()
        };
        // A span of 400 days (`MAX_SPAN_DAYS`) that starts within a day touches 401 days.
        assert_eq!(amounts.by_day(0, u64::MAX / 2).len(), 401);
        assert_eq!(amounts.by_day(5, 3), [(Day(0), amounts)]);
    }
}
