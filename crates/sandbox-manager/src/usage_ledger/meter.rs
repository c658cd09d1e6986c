//! [`Meter`]: measures the usage of one running sandbox.

use super::UsageAmounts;
use jiffy_engine_api::GuestCounters;

/// Owner and size of a running sandbox, and its counters at the last measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Meter {
    /// Owner. Empty for the host's owner.
    pub owner: String,
    /// Memory size in MiB.
    pub memory_mib: u32,
    /// Time of the last measurement, in milliseconds since the start of the host.
    pub up_ms: u64,
    /// Processor time at the last measurement, in microseconds. `None` if unknown.
    pub cpu_us: Option<u64>,
    /// Sent bytes at the last measurement. `None` if unknown.
    pub sent_bytes: Option<u64>,
}

impl Meter {
    /// Returns the usage since the last measurement, and its duration in milliseconds. A counter
    /// that has decreased adds nothing: its present value may have been counted before.
    pub fn measure(&mut self, up_ms: u64, reading: Option<GuestCounters>) -> (UsageAmounts, u64) {
        let elapsed_ms = up_ms.saturating_sub(self.up_ms);
        self.up_ms = self.up_ms.max(up_ms);
        let mut amounts = UsageAmounts {
            sandbox_ms: elapsed_ms,
            memory_mib_ms: elapsed_ms.saturating_mul(u64::from(self.memory_mib)),
            ..UsageAmounts::default()
        };
        if let Some(reading) = reading {
            let before = self.cpu_us.unwrap_or(reading.cpu_us);
            amounts.cpu_us = reading.cpu_us.saturating_sub(before);
            if let (Some(now), Some(before)) = (reading.sent_bytes, self.sent_bytes) {
                amounts.sent_bytes = now.saturating_sub(before);
            }
            self.reset(reading);
        }
        (amounts, elapsed_ms)
    }

    /// Sets the counters without measuring.
    pub fn reset(&mut self, reading: GuestCounters) {
        self.cpu_us = Some(reading.cpu_us);
        self.sent_bytes = reading.sent_bytes.or(self.sent_bytes);
    }
}
