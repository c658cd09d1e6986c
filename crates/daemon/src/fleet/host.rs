//! Implements [`jiffy_fleet::node::Host`]: the fleet's *node*, the task that represents this host
//! in the fleet, reads the free resources of the host. After an interruption, it requests the
//! comparison of the host's sandboxes with the records of the fleet. A *warm pool* contains guests
//! that were started in advance.
//!
//! A *member* is a host of the fleet.

use async_trait::async_trait;
use jiffy_api::Fleet;
use jiffy_fleet::SealedRecords;
use jiffy_fleet::node::{Host, HostSummary, ReconcileError};
use jiffy_fleet::tables::Tables;
use jiffy_fleet_core::{Epoch, HostStatus, Owner, PoolDemand};
use jiffy_sandbox_manager::{SandboxState, Sandboxes, StoreState};
use std::sync::{Arc, OnceLock};
use tokio::sync::watch;

/// Daemon of a member.
pub struct DaemonHost {
    /// Set when the sandboxes are open.
    sandboxes: OnceLock<Sandboxes>,
    /// Set when the API is open.
    fleet: OnceLock<Fleet>,
    /// Tables of the fleet: API keys and template names. Set when the daemon starts to read them.
    tables: OnceLock<Tables>,
    /// Latest demand for warm pools.
    pools: watch::Sender<Vec<PoolDemand>>,
    records: Arc<SealedRecords>,
}

impl DaemonHost {
    pub fn new(records: Arc<SealedRecords>) -> Self {
        Self {
            sandboxes: OnceLock::new(),
            fleet: OnceLock::new(),
            tables: OnceLock::new(),
            pools: watch::Sender::default(),
            records,
        }
    }

    /// Returns the demand for warm pools, and its changes.
    pub fn pools(&self) -> watch::Receiver<Vec<PoolDemand>> {
        self.pools.subscribe()
    }

    pub fn set_tables(&self, tables: Tables) {
        // Each of these setters is called once at the start, so the cell is empty.
        let _ = self.tables.set(tables);
    }

    pub fn set_sandboxes(&self, sandboxes: Sandboxes) {
        let _ = self.sandboxes.set(sandboxes);
    }

    pub fn set_fleet(&self, fleet: Fleet) {
        let _ = self.fleet.set(fleet);
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
        // A host that does not serve the API yet accepts no sandboxes.
        let Some(fleet) = self.fleet.get() else {
            return HostStatus::default();
        };
        let free = sandboxes.figures().free();
        let templates = fleet.templates();
        let unlimited = |amount: Option<u64>| mib(Some(amount.unwrap_or(u64::MAX)));
        HostStatus {
            free_cpu_milli: cpu_milli() / 100 * u32::from(free.cpu_percent),
            free_memory_mib: unlimited(free.memory_mib),
            free_disk_mib: unlimited(free.disk_mib),
            is_store_reachable: self.records.is_reachable(),
            templates: templates.present.clone(),
            builds: templates.builds.clone(),
            creates: u32::try_from(free.starting).unwrap_or(u32::MAX),
        }
    }

    // At the start of the node, the shares (parts of the limits of API keys) do not include the
    // existing sandboxes. The API counts these sandboxes later, when they are open.
    fn starts_counted(&self) -> bool {
        false
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
            free_memory_mib: sandboxes.figures().free().memory_mib.unwrap_or(0),
            tables: self.tables.get().map_or(0, Tables::number),
        }
    }

    fn set_pools(&self, pools: Vec<PoolDemand>) {
        self.pools.send_replace(pools);
    }

    async fn reconcile(&self, owner: Owner) -> Result<(), ReconcileError> {
        let failed = |sandbox: String, reason: String| ReconcileError { sandbox, reason };
        let sandboxes = self.sandboxes.get();
        let sandboxes =
            sandboxes.ok_or_else(|| failed(String::new(), "the daemon is starting".to_owned()))?;
        // The *epoch* is the number of this host's registration. It is greater than 1 if the fleet
        // has declared an earlier incarnation of this host dead.
        let reconciled = sandboxes.reconcile_heads(owner.epoch > Epoch(1)).await;
        reconciled.map_err(|(sandbox, error)| failed(sandbox, error.to_string()))
    }
}
