//! Measures the usage of a sandbox for the ledger of the host.

use super::SandboxEntry;
use jiffy_engine_api::GuestCounters;

impl SandboxEntry {
    /// Counts the usage of the guest until now. Called before an operation stops the guest, whose
    /// counters cannot be read afterwards.
    pub fn meter(&self) {
        if let Some(guest) = self.guest() {
            self.meter_counters(guest.counters());
        }
    }

    /// Like [`Self::meter`], with the counters of the guest.
    pub fn meter_counters(&self, counters: Option<GuestCounters>) {
        if let Some(ledger) = self.indexes.usage.get() {
            ledger.sample(&self.id, counters);
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
                // The last change of the state of a running sandbox is the start of its guest.
                let (memory_mib, started_ms) = (record.size.memory_mib, record.changed_ms);
                ledger.adopt(&self.id, owner, memory_mib, started_ms);
            });
        }
    }

    /// Continues to count the usage of a guest whose counters may have changed in a rollback.
    pub fn reset_meter(&self) {
        let counters = self.guest().and_then(|guest| guest.counters());
        if let (Some(ledger), Some(counters)) = (self.indexes.usage.get(), counters) {
            ledger.reset(&self.id, counters);
        }
    }
}
