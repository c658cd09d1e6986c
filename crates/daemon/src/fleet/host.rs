//! The daemon, as its node uses it.

use async_trait::async_trait;
use jiffy_fleet::node::{Host, HostSummary, ReconcileError};
use jiffy_fleet::tables::Tables;
use jiffy_fleet_core::{Epoch, HostStatus, Owner};
use jiffy_sandbox_manager::{SandboxState, Sandboxes, StoreState};
use std::sync::OnceLock;

/// Daemon of a member.
#[derive(Default)]
pub struct DaemonHost {
    /// Set when the sandboxes are open.
    sandboxes: OnceLock<Sandboxes>,
    /// Set when the tables are being read.
    tables: OnceLock<Tables>,
}

impl DaemonHost {
    pub fn set_tables(&self, tables: Tables) {
        let _ = self.tables.set(tables);
    }

    pub fn set_sandboxes(&self, sandboxes: Sandboxes) {
        let _ = self.sandboxes.set(sandboxes);
    }
}

/// Returns a size in MiB for a message. Zero if it is unknown.
pub(super) fn mib(mib: Option<u64>) -> u32 {
    mib.map_or(0, |mib| u32::try_from(mib).unwrap_or(u32::MAX))
}

/// Returns the processor time of this host, in thousandths of a processor.
pub(super) fn cpu_milli() -> u32 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(processors).unwrap_or(1).saturating_mul(1000)
}

#[async_trait]
impl Host for DaemonHost {
    fn status(&self) -> HostStatus {
        let Some(sandboxes) = self.sandboxes.get() else {
            return HostStatus::default();
        };
        let (figures, limit) = sandboxes.figures().host();
        let reserved = sandboxes.figures().reservations().memory_mib;
        let limit = limit.or(figures.memory_total_mib).unwrap_or(0);
        let unreserved = limit.saturating_sub(reserved);
        let available = figures.memory_available_mib.unwrap_or(unreserved);
        HostStatus {
            // Sandboxes share processors. Only memory and disk space limit their number.
            free_cpu_milli: cpu_milli(),
            free_memory_mib: mib(Some(unreserved.min(available))),
            free_disk_mib: mib(figures.disk_free_mib),
            // The last two values only rank hosts for a placement. They are not measured yet,
            // because each create runs on the host that receives it.
            is_store_reachable: true,
            templates: Vec::new(),
        }
    }

    fn summary(&self) -> HostSummary {
        let Some(sandboxes) = self.sandboxes.get() else {
            return HostSummary::default();
        };
        let states = sandboxes.figures().states();
        let count = |state: &str| states.get(state).map_or(0, |&count| count as u64);
        let is_local = |snapshot: &str| {
            sandboxes.snapshots().store_state_of(snapshot) != Some(StoreState::Stored)
        };
        let unstored = sandboxes.list().into_iter().filter(|sandbox| {
            *sandbox.state() == SandboxState::Paused && sandbox.snapshot().is_none_or(is_local)
        });
        HostSummary {
            running: count("running"),
            paused: count("paused"),
            unstored: unstored.count() as u64,
            warm: sandboxes.pool().waiting() as u64,
            free_memory_mib: u64::from(self.status().free_memory_mib),
            tables: self.tables.get().map_or(0, Tables::number),
        }
    }

    async fn reconcile(&self, owner: Owner) -> Result<(), ReconcileError> {
        let failed = |sandbox: String, reason: String| ReconcileError { sandbox, reason };
        let sandboxes = self.sandboxes.get();
        let sandboxes =
            sandboxes.ok_or_else(|| failed(String::new(), "the daemon is starting".to_owned()))?;
        let reconciled = sandboxes.reconcile_heads(owner.epoch > Epoch(1)).await;
        reconciled.map_err(|(sandbox, error)| failed(sandbox, error.to_string()))
    }
}
