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

/// Daemon of a node: its sandboxes, and the state that it reports. The sandboxes are `None` until
/// they are open. The state is `None` if the daemon reports the default state.
#[derive(Default)]
pub struct TestHost(pub Mutex<Option<Sandboxes>>, pub Mutex<Option<HostStatus>>);

#[async_trait]
impl Host for TestHost {
    fn status(&self) -> HostStatus {
        let status = self.1.lock().unwrap().clone();
        status.unwrap_or_else(|| with_free(64_000))
    }

    fn summary(&self) -> HostSummary {
        HostSummary::default()
    }

    async fn reconcile(&self, owner: Owner) -> Result<(), ReconcileError> {
        let failed = |sandbox, reason| ReconcileError { sandbox, reason };
        let sandboxes = self.0.lock().unwrap().clone();
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

/// Figures of a host. If the value is true, the host is full and rejects all sandboxes.
#[derive(Debug, Default)]
pub struct TestFigures(pub AtomicBool);

impl HostReader for TestFigures {
    fn read(&self) -> HostFigures {
        HostFigures {
            tasks_free: self.0.load(Ordering::SeqCst).then_some(0),
            ..HostFigures::default()
        }
    }
}
