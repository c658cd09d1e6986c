//! [`MicroVmEngine`]: starts microVMs from the templates and snapshots of a data directory. The
//! submodules implement the guest, the snapshot files, and restores.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. The *site* is the network in which the sandboxes run. Its
//! settings are certificate authorities and a proxy. The *fingerprint* of a template identifies
//! everything on which its snapshots depend.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

mod boot;
mod guest;
mod import;
mod lazy_restore;
mod merging;
mod overlays;
mod parts;
mod restore;
mod shared;
mod snapshot_files;
mod unassigned;
mod verification;
mod working_set;

pub use lazy_restore::LazyStore;

use crate::agent_identity::renewed;
use crate::data_dir_gc::DataDirGc;
use crate::guest_nic::{self, GuestNic};
use crate::host::Host;
use crate::restore_policy::RestorePolicy;
use crate::template_cache::{TemplateCache, chain};
use async_trait::async_trait;
use guest::{MicroVmGuest, MicroVmHandle};
use jiffy_engine_api::{
    Capabilities, DetachedGuest, Engine, EngineDescription, EngineError, Guest, GuestHandle,
    MICROVM, NetworkRules, ProcessInstance, SandboxIdentity, SandboxSize, SnapshotFiles,
    TemplateState, UnassignedGuest,
};
use jiffy_microvm_engine::{AdoptSpec, CapturedSpec, MicroVm, host_kvm};
use jiffy_network::{Network, NicKind};
use jiffy_proto::agent::SiteSettings;
use jiffy_proto::cpu_level::CpuLevel;
use jiffy_snapshot::Lineage;
use merging::MergeLock;
use parking_lot::Mutex;
use shared::Shared;
use std::sync::Arc;
use working_set::CachedWorkingSets;

/// Engine for microVMs started from the templates and snapshots of one host.
pub struct MicroVmEngine {
    shared: Arc<Shared>,
    /// `None` if guests have no network interface.
    network: Option<Network>,
    data_dir_gc: DataDirGc,
    merges: MergeLock,
    /// Source of memory that is not stored on this host. `None` if there is no such memory.
    lazy: Option<LazyStore>,
    cached_working_sets: CachedWorkingSets,
}

impl MicroVmEngine {
    /// Opens the engine with the templates of `host`.
    pub fn new(host: Host) -> Result<Self, EngineError> {
        Self::open(Arc::new(TemplateCache::new(host)))
    }

    /// Opens the engine with `templates`.
    pub(crate) fn open(templates: Arc<TemplateCache>) -> Result<Self, EngineError> {
        let data_dir_gc = DataDirGc::new(templates.host().home().path());
        Ok(Self {
            shared: Arc::new(Shared::open(templates)?),
            network: None,
            data_dir_gc,
            merges: MergeLock::default(),
            lazy: None,
            cached_working_sets: CachedWorkingSets::default(),
        })
    }

    /// Adds a network interface to guests. Guests of snapshots taken without an interface have
    /// none.
    pub fn with_network(self, network: Option<Network>) -> Self {
        Self { network, ..self }
    }

    /// Returns the part of a template's fingerprint that names the processor level. It is part of
    /// the fingerprint because guests retain the level with which they booted.
    fn cpu_level_tag(&self) -> String {
        match self.shared.host().programs().vmm.cpu_level() {
            CpuLevel::Host => String::new(),
            level => format!(" {level}"),
        }
    }
}

#[async_trait]
impl Engine for MicroVmEngine {
    fn name(&self) -> &'static str {
        MICROVM
    }

    fn description(&self) -> EngineDescription {
        let why = host_kvm::open().err().map(|e| e.to_string());
        EngineDescription {
            name: MICROVM.to_owned(),
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            usable: why.is_none(),
            why,
            default: false,
            capabilities: Capabilities {
                snapshot: true,
                disk_snapshot: true,
                live_snapshot: true,
                incremental: true,
                // `shared.policy` is the policy in force with its reason. Its field `policy` is the
                // policy itself.
                fork_shares_memory: self.shared.policy.policy != RestorePolicy::CopyAll,
                rollback: true,
                pause_frees_memory: true,
                connections_survive_snapshot: true,
                // A resumed guest gets a new network slot, which does not know the guest's
                // connections.
                connections_survive_pause: false,
                verify: true,
                network: self.network.is_some(),
                disk_limits: true,
                nested_kvm: false,
                own_kernel: true,
            },
        }
    }

    fn snapshot_files(&self) -> &dyn SnapshotFiles {
        self
    }

    async fn prepare(&self, template: &str) -> Result<TemplateState, EngineError> {
        let prepared = self.shared.templates.prepare(template).await?;
        let stamp = self.shared.templates.stamp(template);
        // There are stamps of the template's manifest, the VMM program and the agent. The stamp of
        // the VMM program consists of inode, seconds and nanoseconds of the change time. It
        // identifies the program: a snapshot is not reused with another VMM.
        let [_, vmm, _] = stamp.map_err(EngineError::failed)?;
        Ok(TemplateState {
            fingerprint: format!(
                "{} {} vmm {}.{}.{}{}{}",
                // The first is the version of the template's content. The second consists of the
                // checksums of kernel, modules and initial ramdisk.
                prepared.template_version(),
                prepared.version(),
                vmm.0,
                vmm.1,
                vmm.2,
                // Snapshots with and without a network interface have different fingerprints.
                if self.network.is_some() { " net" } else { "" },
                self.cpu_level_tag()
            ),
            startup: prepared.template().manifest.startup.clone(),
        })
    }

    async fn default_size(&self, template: &str) -> Result<SandboxSize, EngineError> {
        self.shared.host().default_size(template).map_err(chain)
    }

    fn check_network(&self, rules: &NetworkRules) -> Result<(), String> {
        guest_nic::check(self.network.as_ref(), rules)
    }

    fn network(&self) -> String {
        guest_nic::describe(self.network.as_ref())
    }

    async fn boot(
        &self,
        template: &str,
        size: SandboxSize,
    ) -> Result<Box<dyn UnassignedGuest>, EngineError> {
        let prepared = self.shared.templates.prepare(template).await?;
        Ok(Box::new(self.bootable(prepared, size, None).await?))
    }

    async fn restore(
        &self,
        id: &str,
        identity: Option<&SandboxIdentity>,
    ) -> Result<Box<dyn UnassignedGuest>, EngineError> {
        let memory = |lineage: &Lineage| self.shared.memory(lineage);
        Ok(Box::new(
            self.restore_unassigned(id, memory, identity).await?,
        ))
    }

    async fn record_working_set(
        &self,
        template: &str,
        id: &str,
        site: &SiteSettings,
    ) -> Result<(), EngineError> {
        // The memory that is touched until the end of the first use is the working set. `site`
        // contains the certificate authorities and the proxy of the guests' network.
        self.record_first_use(template, id, site).await
    }

    async fn adopt(&self, orphan: &DetachedGuest) -> Result<Arc<dyn Guest>, EngineError> {
        let handle = MicroVmHandle::read(&orphan.handle)?;
        let spec = AdoptSpec {
            // The process of the VMM.
            mark: handle.mark,
            vmm: &self.shared.host().programs().vmm,
            directory: &self.shared.socket_directory.sockets,
            store: &self.shared.store,
            parent: orphan.snapshot.clone(),
            net: handle.slot.is_some(),
            modules: handle.modules,
            // The agent may request its identity again, and must then receive fresh entropy.
            identity: renewed(handle.identity.clone()).map_err(EngineError::failed)?,
            // Greeting of the agent, and its boot mode and times.
            hello: handle.hello,
            report: handle.report,
            // Snapshot that the earlier daemon captured and did not publish.
            captured: orphan.captured.clone().map(|id| CapturedSpec {
                id,
                template: handle.image.clone(),
            }),
        };
        let vm = MicroVm::adopt(spec).await.map_err(EngineError::failed)?;
        // The slot is adopted after the guest: if the adoption of the guest fails, the slot is not
        // adopted either.
        let lease = guest_nic::adopted(self.network.as_ref(), handle.slot, &orphan.network).await;
        Ok(Arc::new(MicroVmGuest {
            vm,
            image: handle.image,
            identity: Mutex::new(handle.identity),
            shared: self.shared.clone(),
            nic: GuestNic::new(lease),
        }))
    }

    async fn end_unadopted(&self, known: &[GuestHandle]) -> Result<usize, EngineError> {
        // A guest whose handle cannot be parsed cannot be adopted, so it is terminated.
        let handles: Vec<MicroVmHandle> = known
            .iter()
            .filter_map(|handle| MicroVmHandle::read(handle).ok())
            .collect();
        let slots: Vec<u32> = handles.iter().filter_map(|handle| handle.slot).collect();
        let marks: Vec<ProcessInstance> = handles.into_iter().map(|handle| handle.mark).collect();
        let ended =
            jiffy_microvm_engine::end_unadopted(&self.shared.socket_directory.sockets, &marks)
                .await;
        // Reclaim the slots after the VMMs have exited, so that no process uses one. The slots of
        // known guests are retained.
        if let Some(network) = &self.network {
            network.reclaim(NicKind::Tap, &slots);
        }
        ended.map_err(EngineError::failed)
    }

    async fn close(&self) {
        let vmm = self.shared.host().programs().vmm.clone();
        // Ignore a failed task: the next daemon removes control groups that remain.
        let _ = tokio::task::spawn_blocking(move || vmm.close()).await;
    }
}
