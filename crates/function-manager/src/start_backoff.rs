//! Delays between the starts of a process that exits repeatedly, so that a crashing process does
//! not occupy the host.

use std::time::{Duration, Instant};

/// Minimum lifetime of a process that is not counted as a failed start.
const STABLE_LIFE: Duration = Duration::from_secs(10);
/// Unit of the delay. The first restart has no delay. The following restarts wait for 2, 4, 8, ...
/// units.
const DELAY_UNIT: Duration = Duration::from_millis(50);
/// Maximum delay between two starts.
const MAX_DELAY: Duration = Duration::from_secs(30);

/// Delay before the next start of a process, by the number of consecutive failed starts.
#[derive(Debug, Default)]
pub(crate) struct StartBackoff {
    /// Number of consecutive exits. The exit of a process that ran for [`STABLE_LIFE`] counts as
    /// the first.
    failures: u32,
    /// Earliest time of the next start. `None` before the first exit.
    not_before: Option<Instant>,
}

impl StartBackoff {
    /// Records that a process exited after `life`, or that a start failed (`life` is zero).
    pub(crate) fn record_exit(&mut self, life: Duration) {
        if life >= STABLE_LIFE {
            self.failures = 0;
        }
        // The first exit may be an isolated failure: restart the process at once.
        let delay = match self.failures {
            0 => Duration::ZERO,
            n => DELAY_UNIT.saturating_mul(1 << n.min(16)).min(MAX_DELAY),
        };
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(Instant::now() + delay);
    }

    /// Returns the remaining delay before the next start.
    pub(crate) fn wait(&self) -> Duration {
        let now = Instant::now();
        self.not_before
            .map_or(Duration::ZERO, |at| at.saturating_duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_restart_has_no_delay_and_later_delays_grow() {
        let mut backoff = StartBackoff::default();
        backoff.record_exit(Duration::from_secs(1));
        assert_eq!(backoff.wait(), Duration::ZERO);
        let mut before = Duration::ZERO;
        for _ in 0..30 {
            backoff.record_exit(Duration::ZERO);
            // `wait` returns the rest of the delay, which is a little shorter than the maximum.
            assert!(backoff.wait() >= before.min(MAX_DELAY - DELAY_UNIT));
            before = backoff.wait();
        }
        assert!(before <= MAX_DELAY && before > MAX_DELAY / 2);
        backoff.record_exit(STABLE_LIFE);
        assert_eq!(backoff.wait(), Duration::ZERO);
    }
}
