//! [`History`]: samples of a sandbox's resource usage over time, in memory.

use jiffy_engine_api::{GuestUsage, SandboxSize};
use serde::Serialize;
use std::collections::VecDeque;

/// Number of samples retained for each sandbox: one hour at one sample every ten seconds.
pub(crate) const MAX_SAMPLES: usize = 360;

/// Resource usage of a sandbox at one moment. Sizes are in bytes.
///
/// The host measures the values. Memory includes all pages that the guest has touched and not
/// returned, so it includes the guest's page cache. Disk is the space written since the last
/// snapshot. `Observation::measure` reports the values of the guest's kernel instead.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UsageSample {
    /// Time in milliseconds since 1970.
    pub at_ms: u64,
    /// Number of virtual processors.
    pub cpu_count: u8,
    /// Processor usage since the previous sample, in percent of all virtual processors.
    pub cpu_used_pct: f32,
    /// Used memory.
    pub mem_used: u64,
    /// Total memory.
    pub mem_total: u64,
    /// Used memory that is page cache. 0 if only the guest knows it.
    pub mem_cache: u64,
    /// Used disk space.
    pub disk_used: u64,
    /// Total disk space.
    pub disk_total: u64,
    /// Bytes sent since the guest was started. `None` if it has no network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net_out: Option<u64>,
    /// Bytes received since the guest was started. `None` if it has no network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net_in: Option<u64>,
}

/// Minimum duration over which processor usage is computed, in milliseconds: over shorter durations
/// the value would fluctuate.
const MIN_SPAN_MS: u64 = 500;

/// Samples of one sandbox, oldest first.
#[derive(Debug, Default)]
pub(crate) struct History {
    samples: VecDeque<UsageSample>,
    /// Time of the last sample in milliseconds, and the processor time until then in microseconds.
    before: Option<(u64, u64)>,
    /// Time and processor time at the last [`Self::check`], in the units of `before`.
    checked: Option<(u64, u64)>,
}

impl History {
    /// Adds the usage of a guest of `size` at `now_ms`, and returns the sample.
    pub fn add(&mut self, now_ms: u64, size: SandboxSize, usage: GuestUsage) -> UsageSample {
        let sample = self.sample_since(self.before, now_ms, size, usage);
        self.before = Some((now_ms, usage.cpu_us));
        if self.samples.len() >= MAX_SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
        sample
    }

    /// Returns the usage of a guest of `size` at `now_ms` without storing it, so that queries do
    /// not displace older samples. Processor usage is measured since the last stored sample.
    pub fn peek(&self, now_ms: u64, size: SandboxSize, usage: GuestUsage) -> UsageSample {
        self.peek_since(self.before, now_ms, size, usage)
    }

    /// Like [`Self::peek`], for checks whether a sandbox is idle. Processor usage is measured since
    /// the last check, if this check was later than the last stored sample.
    pub fn check(&mut self, now_ms: u64, size: SandboxSize, usage: GuestUsage) -> UsageSample {
        // The later time is greater, and `None` is less than all times.
        let since = self.before.max(self.checked);
        self.checked = Some((now_ms, usage.cpu_us));
        self.peek_since(since, now_ms, size, usage)
    }

    /// Returns a sample of the usage since the last one, without storing it.
    fn peek_since(
        &self,
        since: Option<(u64, u64)>,
        now_ms: u64,
        size: SandboxSize,
        usage: GuestUsage,
    ) -> UsageSample {
        let sample = self.sample_since(since, now_ms, size, usage);
        match (since, self.samples.back()) {
            // The time is too short for a measurement: the value of the last sample is still
            // accurate.
            (Some((then_ms, _)), Some(last)) if now_ms < then_ms + MIN_SPAN_MS => UsageSample {
                cpu_used_pct: last.cpu_used_pct,
                ..sample
            },
            _ => sample,
        }
    }

    /// Returns the usage with the processor usage since `since`: a time in milliseconds, and the
    /// processor time until then in microseconds.
    fn sample_since(
        &self,
        since: Option<(u64, u64)>,
        now_ms: u64,
        size: SandboxSize,
        usage: GuestUsage,
    ) -> UsageSample {
        let cpu_used_pct = match since {
            // A guest that was restored runs in another process, whose processor time starts at 0.
            Some((then_ms, cpu_us)) if now_ms > then_ms && usage.cpu_us >= cpu_us => {
                let available_us = (now_ms - then_ms) as f64 * 1000.0 * f64::from(size.vcpus);
                ((usage.cpu_us - cpu_us) as f64 / available_us * 100.0).min(100.0) as f32
            }
            _ => 0.0,
        };
        let (mem_total, disk_total) = (u64::from(size.memory_mib) << 20, size.disk_mib << 20);
        // An engine may not know the disk space at the moment; it changes slowly.
        let last_disk = self.samples.back().map_or(0, |s| s.disk_used);
        UsageSample {
            at_ms: now_ms,
            cpu_count: size.vcpus,
            cpu_used_pct,
            mem_used: usage.memory_bytes.min(mem_total),
            mem_total,
            mem_cache: 0,
            disk_used: usage.disk_bytes.unwrap_or(last_disk).min(disk_total),
            disk_total,
            net_out: usage.net_bytes.map(|(out, _)| out),
            net_in: usage.net_bytes.map(|(_, back)| back),
        }
    }

    /// Returns the samples from `start_ms` to `end_ms`, both included.
    pub fn between(&self, start_ms: Option<u64>, end_ms: Option<u64>) -> Vec<UsageSample> {
        let range = start_ms.unwrap_or(0)..=end_ms.unwrap_or(u64::MAX);
        let within = self.samples.iter().filter(|s| range.contains(&s.at_ms));
        within.copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(cpu_us: u64) -> GuestUsage {
        GuestUsage {
            cpu_us,
            memory_bytes: 5 << 20,
            disk_bytes: Some(4096),
            net_bytes: Some((7, 8)),
        }
    }

    #[test]
    fn processor_usage_covers_all_processors_since_the_previous_sample() {
        let mut history = History::default();
        let size = SandboxSize::default();
        history.add(10_000, size, usage(7_000_000));
        history.add(20_000, size, usage(12_000_000));
        // The guest was restored in another process.
        history.add(30_000, size, usage(1_000));
        history.add(40_000, size, usage(900_000_000));
        let used: Vec<f32> = history
            .between(None, None)
            .iter()
            .map(|s| s.cpu_used_pct)
            .collect();
        assert_eq!(used, [0.0, 25.0, 0.0, 100.0]);
        // A peek is not stored.
        let peek = history.peek(50_000, size, usage(905_000_000));
        assert_eq!((peek.cpu_used_pct, peek.net_in), (25.0, Some(8)));
        let soon = history.peek(40_001, size, usage(905_000_000));
        assert_eq!(soon.cpu_used_pct, 100.0);
        assert_eq!(history.between(None, None).len(), 4);
        let some = history.between(Some(20_000), Some(30_000));
        assert_eq!(
            some.iter().map(|s| s.at_ms).collect::<Vec<_>>(),
            [20_000, 30_000]
        );
        assert_eq!((some[0].mem_used, some[0].mem_total), (5 << 20, 512 << 20));
    }

    #[test]
    fn a_check_measures_the_time_since_the_last_check_or_sample() {
        let mut history = History::default();
        let size = SandboxSize::default();
        history.add(10_000, size, usage(0));
        let mut check = |at_ms, cpu_us| history.check(at_ms, size, usage(cpu_us)).cpu_used_pct;
        assert_eq!(check(11_000, 1_000_000), 50.0);
        // The earlier usage does not count again.
        assert_eq!(check(12_000, 1_000_000), 0.0);
        assert_eq!(check(13_000, 3_000_000), 100.0);
        history.add(14_000, size, usage(3_000_000));
        assert_eq!(
            history.check(16_000, size, usage(4_000_000)).cpu_used_pct,
            25.0
        );
        assert_eq!(history.between(None, None).len(), 2);
    }

    #[test]
    fn old_samples_are_dropped_and_unknown_values_carried_over() {
        let mut history = History::default();
        let size = SandboxSize::default();
        for i in 0..1000 {
            history.add(i, size, usage(0));
        }
        let unknown = GuestUsage {
            disk_bytes: None,
            ..usage(0)
        };
        history.add(1000, size, unknown);
        let all = history.between(None, None);
        assert_eq!(
            (all.len(), all[0].at_ms),
            (MAX_SAMPLES, 1001 - MAX_SAMPLES as u64)
        );
        assert_eq!(all[MAX_SAMPLES - 1].disk_used, 4096);
    }
}
