//! Resources that sandboxes used over time.

use jiffy_engine_api::{GuestUsage, SandboxSize};
use serde::Serialize;
use std::collections::VecDeque;

/// Samples kept of each sandbox: an hour of them at one every ten seconds.
pub(crate) const MAX_SAMPLES: usize = 360;

/// Resources that a sandbox used at one moment. Sizes in bytes.
///
/// As the host sees it: memory is what the guest ever touched and did not give back, so its page
/// cache is part of it; disk is what it wrote since its last snapshot.
/// [`crate::Sandboxes::measure`] asks the guest itself.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UsageSample {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// Virtual processors.
    pub cpu_count: u8,
    /// Use of all of them together since the sample before, in percent: 100 is all of them all the
    /// time.
    pub cpu_used_pct: f32,
    /// Memory in use.
    pub mem_used: u64,
    /// Memory there is.
    pub mem_total: u64,
    /// Of the memory in use, what only caches files; 0 where only the guest knows.
    pub mem_cache: u64,
    /// Disk in use.
    pub disk_used: u64,
    /// Disk there is.
    pub disk_total: u64,
    /// Bytes that it sent over its network since its guest came up; none: it has no network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net_out: Option<u64>,
    /// Bytes that it received likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net_in: Option<u64>,
}

/// Shortest time over which use of processors is told, in milliseconds.
const SHORTEST_SPAN_MS: u64 = 500;

/// The samples of one sandbox, oldest first.
#[derive(Debug, Default)]
pub(crate) struct History {
    samples: VecDeque<UsageSample>,
    /// When processor time was read last, and what it was.
    before: Option<(u64, u64)>,
}

impl History {
    /// Adds what a guest of `size` uses at `now_ms`.
    pub fn add(&mut self, now_ms: u64, size: SandboxSize, usage: GuestUsage) {
        let sample = self.sample(now_ms, size, usage);
        self.before = Some((now_ms, usage.cpu_us));
        if self.samples.len() >= MAX_SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// Returns what a guest of `size` uses at `now_ms`, which is not kept: looks in between do not
    /// shorten the history. Processors are those since the sample before.
    pub fn peek(&self, now_ms: u64, size: SandboxSize, usage: GuestUsage) -> UsageSample {
        let sample = self.sample(now_ms, size, usage);
        match (self.before, self.samples.back()) {
            (Some((then_ms, _)), Some(last)) if now_ms < then_ms + SHORTEST_SPAN_MS => {
                UsageSample {
                    cpu_used_pct: last.cpu_used_pct,
                    ..sample
                }
            }
            _ => sample,
        }
    }

    fn sample(&self, now_ms: u64, size: SandboxSize, usage: GuestUsage) -> UsageSample {
        let cpu_used_pct = match self.before {
            // Less than before: it is another process now.
            Some((then_ms, cpu_us)) if now_ms > then_ms && usage.cpu_us >= cpu_us => {
                let had_us = (now_ms - then_ms) as f64 * 1000.0 * f64::from(size.vcpus);
                ((usage.cpu_us - cpu_us) as f64 / had_us * 100.0).min(100.0) as f32
            }
            _ => 0.0,
        };
        let (mem_total, disk_total) = (u64::from(size.memory_mib) << 20, size.disk_mib << 20);
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

    /// Those from `start_ms` to `end_ms`, both included.
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
    fn processor_use_is_of_all_processors_and_since_the_sample_before() {
        let mut history = History::default();
        let size = SandboxSize::default();
        history.add(10_000, size, usage(7_000_000));
        history.add(20_000, size, usage(12_000_000));
        // Restored: another process.
        history.add(30_000, size, usage(1_000));
        history.add(40_000, size, usage(900_000_000));
        let used: Vec<f32> = history
            .between(None, None)
            .iter()
            .map(|s| s.cpu_used_pct)
            .collect();
        assert_eq!(used, [0.0, 25.0, 0.0, 100.0]);
        // A look at one moment is not kept.
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
