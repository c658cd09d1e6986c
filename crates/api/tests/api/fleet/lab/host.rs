//! Daemon of a member, and the figures of its host.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until it is declared
//! dead. Its first epoch has the number 1.

use async_trait::async_trait;
use jiffy_fleet::node::{Host, HostSummary, ReconcileError};
use jiffy_fleet_core::{Epoch, HostStatus, Owner};
use jiffy_sandbox_manager::{HostFigures, HostReader, Sandboxes};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Daemon of a node.
#[derive(Default)]
pub struct TestHost {
    /// Sandboxes. `None` until they are open.
    pub sandboxes: Mutex<Option<Sandboxes>>,
    /// Reported state. `None` for the default state.
    pub status: Mutex<Option<HostStatus>>,
}

#[async_trait]
impl Host for TestHost {
    fn status(&self) -> HostStatus {
        let status = self.status.lock().unwrap().clone();
        status.unwrap_or_else(|| with_free(64_000))
    }

    fn summary(&self) -> HostSummary {
        HostSummary::default()
    }

    async fn reconcile(&self, owner: Owner) -> Result<(), ReconcileError> {
        let failed = |sandbox, reason| ReconcileError { sandbox, reason };
        let sandboxes = self.sandboxes.lock().unwrap().clone();
        let sandboxes = sandboxes.ok_or_else(|| failed(String::new(), "starting".to_owned()))?;
        // In a later epoch, other hosts may have killed sandboxes that were never stored, so these
        // are compared, too.
        let reconciled = sandboxes.reconcile_heads(owner.epoch > Epoch(1)).await;
        reconciled.map_err(|(id, e)| failed(id, e.to_string()))
    }

    fn epoch_ended(&self, _epoch: Epoch) {}

    fn verdict(&self, _owner: Owner) {}
}

/// Returns the state of a host with free memory, and without reported templates.
pub fn with_free(free_memory_mib: u32) -> HostStatus {
    HostStatus {
        free_cpu_milli: 8_000,
        free_memory_mib,
        free_disk_mib: 10_000_000,
        is_store_reachable: true,
        ..HostStatus::default()
    }
}

/// Figures of a host.
#[derive(Debug, Default)]
pub struct TestFigures {
    /// True if the host is full and rejects all sandboxes.
    pub is_full: AtomicBool,
}

impl HostReader for TestFigures {
    fn read(&self) -> HostFigures {
        HostFigures {
            tasks_free: self.is_full.load(Ordering::SeqCst).then_some(0),
            ..HostFigures::default()
        }
    }
}
