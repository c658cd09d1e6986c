//! [`DayClock`]: the time that assigns usage to days, without steps of the host's clock.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// Difference between the host's clock and the expected time that counts as a step.
const MIN_STEP_MS: u64 = 60_000;
/// Time after which a step that was not reversed is accepted.
const ACCEPT_STEP_MS: u64 = 600_000;

/// Time of the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageMoment {
    /// Milliseconds since 1970. May change by a step.
    pub wall_ms: u64,
    /// Milliseconds since the host was started, without steps.
    pub up_ms: u64,
}

/// Source of time.
pub trait UsageClock: Send + Sync {
    /// Returns the present time.
    fn now(&self) -> UsageMoment;
    /// Returns an id of the present run of the host's kernel. [`UsageMoment::up_ms`] is comparable
    /// within one run. Empty if unknown.
    fn boot(&self) -> String;
}

/// Clock of this host.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostClock;

impl UsageClock for HostClock {
    fn now(&self) -> UsageMoment {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let up = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
        let up = up.map(std::time::Duration::from).unwrap_or_default();
        UsageMoment {
            wall_ms: since.map_or(0, |since| millis(since.as_millis())),
            up_ms: millis(up.as_millis()),
        }
    }

    fn boot(&self) -> String {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        id.map(|id| id.trim().to_owned()).unwrap_or_default()
    }
}

fn millis(ms: u128) -> u64 {
    u64::try_from(ms).unwrap_or(u64::MAX)
}

/// Follows the host's clock, except for steps that are reversed within ten minutes.
#[derive(Debug)]
pub(super) struct DayClock {
    /// Moment at which both clocks agreed.
    anchor: UsageMoment,
    /// Time since the start of the host at which a step was noticed.
    step_ms: Option<u64>,
}

impl DayClock {
    pub fn new(anchor: UsageMoment) -> Self {
        Self {
            anchor,
            step_ms: None,
        }
    }

    /// Returns the moment from which a later ledger of the same run of the host continues.
    pub fn anchor(&self) -> UsageMoment {
        self.anchor
    }

    /// Returns the time in milliseconds since 1970 that the ledger uses at moment `now`.
    pub fn time_ms(&mut self, now: UsageMoment) -> u64 {
        let elapsed = now.up_ms.saturating_sub(self.anchor.up_ms);
        let expected = self.anchor.wall_ms.saturating_add(elapsed);
        let is_step = expected.abs_diff(now.wall_ms) >= MIN_STEP_MS;
        let step_ms = *self.step_ms.get_or_insert(now.up_ms);
        if is_step && now.up_ms.saturating_sub(step_ms) < ACCEPT_STEP_MS {
            return expected;
        }
        self.step_ms = None;
        self.anchor = now;
        now.wall_ms
    }

    /// Returns the time since the start of the host that belongs to `time_ms`, a time in
    /// milliseconds since 1970 after the anchor. `None` for other times.
    pub fn up_ms_at(&self, time_ms: u64) -> Option<u64> {
        let elapsed = time_ms.checked_sub(self.anchor.wall_ms)?;
        Some(self.anchor.up_ms.saturating_add(elapsed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_MS: u64 = 3_600_000;

    fn at(wall_ms: u64, up_ms: u64) -> UsageMoment {
        UsageMoment { wall_ms, up_ms }
    }

    #[test]
    fn a_reversed_step_of_the_clock_has_no_effect() {
        let mut clock = DayClock::new(at(1000 * HOUR_MS, 0));
        assert_eq!(
            clock.time_ms(at(1000 * HOUR_MS + 10, 10)),
            1000 * HOUR_MS + 10
        );
        // A year ahead, then decades back, then correct.
        assert_eq!(
            clock.time_ms(at(9760 * HOUR_MS, 60_010)),
            1000 * HOUR_MS + 60_010
        );
        assert_eq!(clock.time_ms(at(0, 120_010)), 1000 * HOUR_MS + 120_010);
        let correct = at(1000 * HOUR_MS + 180_000, 180_000);
        assert_eq!(clock.time_ms(correct), correct.wall_ms);
        // Small corrections are followed.
        let slewed = at(1000 * HOUR_MS + 239_000, 240_000);
        assert_eq!(clock.time_ms(slewed), slewed.wall_ms);
    }

    #[test]
    fn a_step_that_remains_is_accepted_after_ten_minutes() {
        let mut clock = DayClock::new(at(0, 0));
        assert_eq!(clock.time_ms(at(500 * HOUR_MS, 10)), 10);
        let late = at(500 * HOUR_MS + 599_000, 599_000);
        assert_eq!(clock.time_ms(late), 599_000);
        let later = at(500 * HOUR_MS + 601_000, 601_000);
        assert_eq!(clock.time_ms(later), later.wall_ms);
    }

    #[test]
    fn the_clock_of_the_host_names_its_run() {
        assert!(!HostClock.boot().is_empty());
        assert!(HostClock.now().up_ms > 0 && HostClock.now().wall_ms > 0);
    }
}
