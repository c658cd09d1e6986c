//! Decides whether a sandbox is idle, from figures that the caller read at one moment.

use crate::usage::UsageSample;

/// Processor usage above which a sandbox is in use, in percent of one virtual processor.
const MAX_IDLE_CPU_PCT: f32 = 5.0;

/// Returns whether the processor usage of a sample counts as use of its sandbox.
pub(super) fn is_busy(sample: &UsageSample) -> bool {
    // A sample contains the share of all processors.
    sample.cpu_used_pct * f32::from(sample.cpu_count) > MAX_IDLE_CPU_PCT
}

/// Figures of a sandbox at a check. Times are [`super::use_clock::clock_ms`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UseFigures {
    /// Time of the check.
    pub now_ms: u64,
    /// Time of the last use.
    pub last_use_ms: u64,
    /// True if a use is in progress.
    pub is_in_use: bool,
}

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdleVerdict {
    /// The sandbox was not used for its idle timeout.
    Idle,
    /// The sandbox cannot be idle before this time.
    InUse {
        /// Time of the next check.
        until_ms: u64,
    },
}

/// Decides whether a sandbox with an idle timeout of `timeout_ms` is idle.
pub(super) fn idle_verdict(timeout_ms: u64, figures: UseFigures) -> IdleVerdict {
    let last_use_ms = if figures.is_in_use {
        figures.now_ms
    } else {
        figures.last_use_ms
    };
    let until_ms = last_use_ms.saturating_add(timeout_ms);
    if until_ms <= figures.now_ms {
        IdleVerdict::Idle
    } else {
        IdleVerdict::InUse { until_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the verdict at `now_ms` with a timeout of 1 s. `is_in_use` states whether a request
    /// is in flight.
    fn at(now_ms: u64, last_use_ms: u64, is_in_use: bool) -> IdleVerdict {
        let figures = UseFigures {
            now_ms,
            last_use_ms,
            is_in_use,
        };
        idle_verdict(1000, figures)
    }

    #[test]
    fn a_sandbox_is_idle_after_its_timeout_without_use() {
        let in_use = |until_ms| IdleVerdict::InUse { until_ms };
        assert_eq!(at(1000, 0, false), IdleVerdict::Idle);
        assert_eq!(at(999, 0, false), in_use(1000));
        // A use moves the next check.
        assert_eq!(at(1000, 700, false), in_use(1700));
        assert_eq!(at(1700, 700, false), IdleVerdict::Idle);
        // A use in progress counts until it ends.
        assert_eq!(at(9000, 0, true), in_use(10_000));
        // The sandbox was used after the caller had read the time of the check.
        assert_eq!(at(1000, 1001, false), in_use(2001));
    }

    #[test]
    fn a_timeout_at_the_end_of_time_never_passes() {
        let figures = UseFigures {
            now_ms: 5,
            last_use_ms: 5,
            is_in_use: false,
        };
        let never = IdleVerdict::InUse { until_ms: u64::MAX };
        assert_eq!(idle_verdict(u64::MAX, figures), never);
    }

    #[test]
    fn only_a_processor_usage_above_the_level_is_a_use() {
        let sample = |cpu_count, cpu_used_pct| UsageSample {
            at_ms: 0,
            cpu_count,
            cpu_used_pct,
            mem_used: 0,
            mem_total: 0,
            mem_cache: 0,
            disk_used: 0,
            disk_total: 0,
            net_out: None,
            net_in: None,
        };
        assert!(!is_busy(&sample(1, 5.0)));
        assert!(is_busy(&sample(1, 5.1)));
        // 2 % of four processors are 8 % of one.
        assert!(is_busy(&sample(4, 2.0)));
        assert!(!is_busy(&sample(4, 1.0)));
    }

    #[test]
    fn a_simulated_sandbox_is_paused_one_timeout_after_its_last_use() {
        // Uses at these times, and a use in progress from 2500 to 9000.
        let uses = [0_u64, 300, 1200, 1900, 9000];
        let mut now = 1000;
        let mut checks = 0;
        let paused_at = loop {
            let last = uses.iter().copied().filter(|at| *at <= now).max().unwrap();
            match at(now, last, (2500..9000).contains(&now)) {
                IdleVerdict::Idle => break now,
                IdleVerdict::InUse { until_ms } => {
                    // Each check is in the future, so the checks end.
                    assert!(until_ms > now);
                    now = until_ms;
                    checks += 1;
                }
            }
        };
        assert_eq!(paused_at, 10_000);
        // The simulation lasts 10 s. Checks are about one timeout (1 s) apart, and a few
        // follow single uses.
        assert!(checks <= 12, "{checks} checks");
    }
}
