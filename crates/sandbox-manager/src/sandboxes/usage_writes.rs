//! Task that writes the usage ledger to the disk periodically.

use super::entry::SandboxEntry;
use super::observe::each_running;
use super::{Sandboxes, SandboxesInner};
use crate::usage_ledger::UsageLedger;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Interval between writes. A crash of the daemon loses at most the usage of this time.
const WRITE_INTERVAL: Duration = Duration::from_secs(60);

impl Sandboxes {
    /// Returns the ledger of the usage of owners.
    pub fn usage(&self) -> &UsageLedger {
        &self.0.usage
    }

    /// Measures all running sandboxes, and writes the usage of owners.
    pub async fn write_usage(&self) {
        write(&Arc::downgrade(&self.0)).await;
    }

    /// Starts the task that writes the usage while the sandboxes exist.
    pub(super) fn spawn_usage_writes(&self) {
        let inner = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(WRITE_INTERVAL).await;
                if write(&inner).await.is_none() {
                    return;
                }
            }
        });
    }
}

/// Returns `None` once the sandboxes are dropped.
async fn write(inner: &Weak<SandboxesInner>) -> Option<()> {
    // Reads the counters for the ledger only. The usage history of a sandbox has samples at a fixed
    // interval, and receives none here.
    each_running(inner, SandboxEntry::meter).await?;
    let ledger = inner.upgrade()?.usage.clone();
    // The task does not panic.
    let _ = tokio::task::spawn_blocking(move || write_now(&ledger)).await;
    Some(())
}

/// Writes the measured usage. Blocks.
pub(super) fn write_now(ledger: &UsageLedger) {
    if let Err(error) = ledger.write() {
        tracing::error!(%error, "cannot write the usage of keys; it remains in memory");
    }
}
