//! Measures the usage of a sandbox for the ledger of the host.

use super::SandboxEntry;
use crate::usage_ledger::UsageReading;
use jiffy_engine_api::GuestUsage;

impl SandboxEntry {
    /// Counts the usage of the guest until now. Called before an operation stops the guest, whose
    /// counters cannot be read afterwards.
    pub fn meter(&self) {
        if let Some(guest) = self.guest() {
            self.meter_usage(guest.usage());
        }
    }

    /// Like [`Self::meter`], with the counters of the guest.
    pub fn meter_usage(&self, usage: Option<GuestUsage>) {
        if let Some(ledger) = self.indexes.usage.get() {
            ledger.sample(&self.id, usage.map(UsageReading::from));
        }
    }

    /// Starts to count the usage of a guest, whose counters the next measurement reads. The caller
    /// must hold `op_lock`.
    pub fn start_meter(&self) {
        if let Some(ledger) = self.indexes.usage.get() {
            self.with_record(|record| {
                let owner = record.settings.owner.as_deref();
                ledger.start(&self.id, owner, record.size.memory_mib, None);
            });
        }
    }

    /// Continues to count the usage of a guest that ran while no daemon was running.
    pub fn adopt_meter(&self) {
        if let Some(ledger) = self.indexes.usage.get() {
            self.with_record(|record| {
                let owner = record.settings.owner.as_deref();
                let (memory_mib, started_ms) = (record.size.memory_mib, record.changed_ms);
                ledger.adopt(&self.id, owner, memory_mib, started_ms);
            });
        }
    }

    /// Continues to count the usage of a guest whose counters may have changed in a rollback.
    pub fn reset_meter(&self) {
        let usage = self.guest().and_then(|guest| guest.usage());
        if let (Some(ledger), Some(usage)) = (self.indexes.usage.get(), usage) {
            ledger.reset(&self.id, usage.into());
        }
    }
}
