//! The engine `microvm` in the host's terms: templates, snapshots and programs of a data directory.

mod arrival;
mod guest;
mod import;
mod lazy_restore;
mod merging;
mod overlays;
mod parts;
mod rollback;
mod take_snapshot;
mod unassigned;
mod verification;
mod working_set;

pub use guest::MicroVmGuest;
pub use lazy_restore::LazyStore;
pub use unassigned::UnassignedMicroVmGuest;

use crate::agent_identity::renewed;
use crate::data_dir_gc::DataDirGc;
use crate::guest_nic::{self, GuestNic};
use crate::host::Host;
use crate::restore_policy::{HostFingerprint, PolicyInForce, RestorePolicy};
use crate::template_cache::{TemplateCache, chain};
use guest::{MicroVmHandle, SocketDirectory};
use jiffy_engine_api::{
    AfterSnapshot, Capabilities, CaptureNotice, Engine, EngineDescription, EngineError,
    ExistingSnapshot, FoldPace, FoldResult, GuestHandle, ImportedFiles, KeptGuest, LineageLimits,
    MICROVM, NetworkRules, ProcessInstance, RollbackFailure, SandboxIdentity, SandboxSize,
    SnapshotImport, SnapshotParts, SnapshotTimes, SnapshotWalk, Startup, VerifiedSnapshot,
};
use jiffy_microvm_engine::{AdoptSpec, CapturedSpec, MicroVm, host_kvm};
use jiffy_network::{Network, NicKind};
use jiffy_proto::agent::{Identity, SiteSettings};
use jiffy_proto::cpu_level::CpuLevel;
use jiffy_snapshot::Store;
use merging::MergeLock;
use overlays::OverlaysAhead;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::SystemTime;
use unassigned::BootStage;
use working_set::CachedWorkingSets;

/// Directory of the snapshots in the data directory.
const SNAPSHOTS: &str = "snapshots";

/// MicroVMs made from the templates and snapshots of one host.
pub struct MicroVmEngine {
    store: Store,
    policy: PolicyInForce,
    /// None: guests have no network card.
    network: Option<Network>,
    socket_directory: SocketDirectory,
    templates: Arc<TemplateCache>,
    data_dir_gc: DataDirGc,
    merges: MergeLock,
    /// Source of memory that has not arrived; none: all memory is here.
    lazy: Option<LazyStore>,
    cached_working_sets: CachedWorkingSets,
    overlays: OverlaysAhead,
}

impl MicroVmEngine {
    /// The engine of `host`.
    pub fn new(host: Host) -> Result<Self, EngineError> {
        Self::on(Arc::new(TemplateCache::new(host)))
    }

    /// The engine of the host of `shelf`.
    pub(crate) fn on(templates: Arc<TemplateCache>) -> Result<Self, EngineError> {
        let host = templates.host();
        let store = Store::open(host.home().path().join(SNAPSHOTS)).map_err(EngineError::failed)?;
        let socket_directory =
            SocketDirectory::open(&host.home().run()).map_err(EngineError::failed)?;
        let policy = PolicyInForce::find(host.home().path(), &HostFingerprint::here());
        tracing::info!(
            "memory of restored sandboxes: {} ({})",
            policy.policy,
            policy.why
        );
        Ok(Self {
            store,
            policy,
            network: None,
            socket_directory,
            data_dir_gc: DataDirGc::of(templates.host().home().path()),
            templates,
            merges: MergeLock::default(),
            lazy: None,
            cached_working_sets: CachedWorkingSets::default(),
            overlays: OverlaysAhead::default(),
        })
    }

    /// Gives guests a network card. Those of snapshots that were taken without one stay as they
    /// are.
    pub fn with_network(self, network: Option<Network>) -> Self {
        Self { network, ..self }
    }

    /// Its host.
    pub fn host(&self) -> &Host {
        self.templates.host()
    }

    /// Part of a template's snapshot's name: guests keep the level that they booted with.
    fn cpu_level_tag(&self) -> String {
        match self.host().programs().vmm.cpu_level() {
            CpuLevel::Host => String::new(),
            level => format!(" {level}"),
        }
    }
}

impl Engine for MicroVmEngine {
    type Guest = MicroVmGuest;
    type UnassignedGuest = UnassignedMicroVmGuest;

    fn engines(&self) -> Vec<EngineDescription> {
        let why = host_kvm::open().err().map(|e| e.to_string());
        vec![EngineDescription {
            name: MICROVM.to_owned(),
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            usable: why.is_none(),
            why,
            default: true,
            capabilities: Capabilities {
                snapshot: true,
                live_snapshot: true,
                incremental: true,
                fork_shares_memory: self.policy.policy != RestorePolicy::CopyAll,
                rollback: true,
                pause_frees_memory: true,
                connections_survive_snapshot: true,
                // A guest that is resumed has a slot that knows none of them.
                connections_survive_pause: false,
                verify: true,
                network: self.network.is_some(),
                disk_limits: true,
                nested_kvm: false,
                own_kernel: true,
            },
        }]
    }

    async fn fingerprint(
        &self,
        _engine: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> Result<String, EngineError> {
        let prepared = self.templates.prepare(template).await?;
        let [_, vmm, _] = self
            .templates
            .stamp(template)
            .map_err(EngineError::failed)?;
        Ok(format!(
            "{} {} vmm {}.{}.{} {}c{}m{}d{}{}",
            prepared.template_version(),
            prepared.version(),
            vmm.0,
            vmm.1,
            vmm.2,
            size.vcpus,
            size.memory_mib,
            size.disk_mib,
            if self.network.is_some() { " net" } else { "" },
            self.cpu_level_tag()
        ))
    }

    async fn startup(&self, template: &str) -> Result<Startup, EngineError> {
        let prepared = self.templates.prepare(template).await?;
        Ok(prepared.template().manifest.startup.clone())
    }

    async fn default_size(&self, template: &str) -> Result<SandboxSize, EngineError> {
        self.host().default_size(template).map_err(chain)
    }

    fn check_network(&self, rules: &NetworkRules) -> Result<(), String> {
        guest_nic::check(self.network.as_ref(), rules)
    }

    fn network(&self) -> String {
        guest_nic::describe(self.network.as_ref())
    }

    async fn boot(
        &self,
        _engine: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> Result<UnassignedMicroVmGuest, EngineError> {
        let prepared = self.templates.prepare(template).await?;
        let overlay = self
            .overlays
            .take(&self.store)
            .map_err(EngineError::failed)?;
        let mut spec = prepared
            .boot_spec(size, overlay, Identity::default())
            .map_err(chain)?;
        let mut lease = match &self.network {
            Some(network) => Some(
                network
                    .take(NicKind::Tap)
                    .await
                    .map_err(EngineError::failed)?,
            ),
            None => None,
        };
        if let Some(lease) = &mut lease {
            spec.net = guest_nic::spec(lease);
            spec.extra_cmdline = jiffy_network::guest::cmdline();
        }
        Ok(UnassignedMicroVmGuest {
            coming: BootStage::Bootable(Box::new(spec)),
            prepared,
            socket_directory: self.socket_directory.clone(),
            lease,
        })
    }

    async fn restore(
        &self,
        _template: &str,
        id: &str,
    ) -> Result<UnassignedMicroVmGuest, EngineError> {
        self.arrive(id, |lineage| self.memory(lineage), None).await
    }

    async fn restore_for(
        &self,
        _template: &str,
        id: &str,
        identity: &SandboxIdentity,
    ) -> Result<UnassignedMicroVmGuest, EngineError> {
        self.arrive(id, |lineage| self.memory(lineage), Some(identity))
            .await
    }

    async fn roll_back(
        &self,
        guest: &MicroVmGuest,
        id: &str,
        identity: &SandboxIdentity,
        begin: impl FnOnce() -> bool + Send,
    ) -> Result<(), RollbackFailure> {
        self.roll_back_in_place(guest, id, identity, begin).await
    }

    async fn snapshot(
        &self,
        guest: &MicroVmGuest,
        id: &str,
        _parent: Option<&str>,
        then: AfterSnapshot,
        max_bytes: Option<u64>,
        notice: Option<CaptureNotice>,
    ) -> Result<SnapshotTimes, EngineError> {
        self.take_snapshot(guest, id, then, max_bytes, notice).await
    }

    async fn finish_captured(&self, guest: &MicroVmGuest) -> Result<SnapshotTimes, EngineError> {
        let saved = guest.vm.finish_captured(&self.store).await;
        take_snapshot::times(guest, saved, None)
    }

    fn discard_captured(&self, id: &str) {
        if let Err(e) = self.store.discard_captured(id) {
            tracing::warn!(id, "files of a captured snapshot stay: {e}");
        }
    }

    async fn record_working_set(
        &self,
        template: &str,
        id: &str,
        site: &SiteSettings,
    ) -> Result<(), EngineError> {
        self.record_first_use(template, id, site).await
    }

    fn prefetch(&self, id: &str) -> Result<(), EngineError> {
        let lineage = self.store.lineage(id).map_err(EngineError::failed)?;
        if !lineage.is_complete() {
            return Ok(());
        }
        lineage.prefetch().map(drop).map_err(EngineError::failed)
    }

    fn write_checksums(&self, id: &str) -> Result<(), EngineError> {
        let lineage = self.store.lineage(id).map_err(EngineError::failed)?;
        if !lineage.is_complete() {
            return Ok(());
        }
        let mut sealed = lineage
            .snapshots()
            .iter()
            .map(|snapshot| snapshot.write_checksums());
        sealed.try_for_each(|sealed| sealed.map_err(EngineError::failed))
    }

    fn verify(&self, id: &str) -> Result<Vec<VerifiedSnapshot>, EngineError> {
        verification::verify(&self.store, id)
    }

    async fn adopt(&self, orphan: &KeptGuest) -> Result<MicroVmGuest, EngineError> {
        let handle = MicroVmHandle::read(&orphan.handle)?;
        let spec = AdoptSpec {
            mark: handle.mark,
            vmm: &self.host().programs().vmm,
            directory: &self.socket_directory.sockets,
            store: &self.store,
            parent: orphan.snapshot.clone(),
            net: handle.slot.is_some(),
            modules: handle.modules,
            identity: renewed(handle.identity.clone()).map_err(EngineError::failed)?,
            hello: handle.hello,
            report: handle.report,
            captured: orphan.captured.clone().map(|id| CapturedSpec {
                id,
                template: handle.image.clone(),
            }),
        };
        let vm = MicroVm::adopt(spec).await.map_err(EngineError::failed)?;
        let lease = guest_nic::adopted(self.network.as_ref(), handle.slot, &orphan.network).await;
        Ok(MicroVmGuest {
            vm,
            image: handle.image,
            identity: Mutex::new(handle.identity),
            socket_directory: self.socket_directory.clone(),
            nic: GuestNic::new(lease),
        })
    }

    async fn end_unadopted(&self, known: &[GuestHandle]) -> Result<usize, EngineError> {
        // One whose words are not understood cannot be adopted either.
        let known: Vec<MicroVmHandle> = known
            .iter()
            .filter_map(|handle| MicroVmHandle::read(handle).ok())
            .collect();
        let slots: Vec<u32> = known.iter().filter_map(|handle| handle.slot).collect();
        let marks: Vec<ProcessInstance> = known.into_iter().map(|handle| handle.mark).collect();
        let ended =
            jiffy_microvm_engine::end_unadopted(&self.socket_directory.sockets, &marks).await;
        if let Some(network) = &self.network {
            network.reclaim(NicKind::Tap, &slots);
        }
        ended.map_err(EngineError::failed)
    }

    async fn close(&self) {
        let vmm = self.host().programs().vmm.clone();
        // A gc that is lost leaves groups to the next daemon.
        let _ = tokio::task::spawn_blocking(move || vmm.close()).await;
    }

    fn snapshots(&self) -> Result<Vec<String>, EngineError> {
        self.store.ids().map_err(EngineError::failed)
    }

    fn walk_snapshots(&self) -> Result<SnapshotWalk, EngineError> {
        let walk = self.store.walk(SystemTime::now());
        let walk = walk.map_err(EngineError::failed)?;
        Ok(Box::new(walk.map(|id| id.map_err(EngineError::failed))))
    }

    fn damage(&self, id: &str) -> Option<String> {
        self.store.find_damage(id).map(|damage| damage.to_string())
    }

    fn is_independent(&self, id: &str) -> bool {
        self.store.is_independent(id).unwrap_or(false)
    }

    fn gc(&self) -> Result<usize, EngineError> {
        self.templates.forget_older();
        self.host().programs().vmm.gc();
        let removed = self.data_dir_gc.run(SystemTime::now());
        for path in &removed {
            tracing::info!("removed {}, which nobody uses", path.display());
        }
        Ok(removed.len())
    }

    fn snapshot_size(&self, id: &str) -> Option<u64> {
        self.store.get(id).and_then(|s| s.bytes()).ok()
    }

    fn lies_on(&self, id: &str, ancestor: &str) -> bool {
        merging::lies_on(&self.store, id, ancestor)
    }

    fn merge_growth(&self, id: &str, limits: LineageLimits) -> Option<u64> {
        let lineage = self.store.lineage(id).ok()?;
        merging::growth(&lineage, merging::oldest(&lineage, limits)?)
    }

    async fn merge(&self, id: &str, limits: LineageLimits) -> Result<(), EngineError> {
        let _guard = self.merges.lock_for_merge().await;
        // Another call may have merged it meanwhile.
        let lineage = self.store.lineage(id).map_err(EngineError::failed)?;
        let Some(oldest) = merging::oldest(&lineage, limits) else {
            return Ok(());
        };
        // Boxed: it is deep, and rare.
        Box::pin(self.complete(id)).await?;
        let (store, owned) = (self.store.clone(), id.to_owned());
        let merged = tokio::task::spawn_blocking(move || store.merge(&owned, oldest)).await;
        let merged = merged.map_err(EngineError::failed)?;
        merged.map(drop).map_err(EngineError::failed)
    }

    fn parent_on_disk(&self, id: &str) -> Option<String> {
        self.store.manifest(id).ok()?.parent
    }

    fn prepare_fold(&self, id: &str, max_copy: u64, pace: &mut FoldPace<'_>) -> FoldResult {
        self.merges.prepare_fold(&self.store, id, max_copy, pace)
    }

    fn is_current(&self, template: &str, id: &str) -> bool {
        let taken = self.store.manifest(id).map(|taken| taken.template);
        self.templates.serves(template, taken.ok().as_deref())
    }

    fn restores_lazily(&self, _engine: &str) -> bool {
        self.restores_lazily_here()
    }

    fn want_all(&self, id: &str) -> Result<(), EngineError> {
        self.want_all_memory(id)
    }

    fn missing_memory(&self, id: &str) -> Result<Option<String>, EngineError> {
        self.missing_of(id)
    }

    async fn complete_memory(&self, id: &str) -> Result<(), EngineError> {
        // Boxed: it is deep, and rare.
        Box::pin(self.complete_one(id)).await
    }

    async fn check_import(&self, import: &SnapshotImport) -> Result<(), EngineError> {
        self.can_restore(import).await
    }

    async fn import_snapshot(
        &self,
        import: &SnapshotImport,
        files: ImportedFiles,
        existing: ExistingSnapshot,
    ) -> Result<(), EngineError> {
        self.take_in(import, files, existing).await
    }

    fn snapshot_parts(&self, id: &str) -> Result<SnapshotParts, EngineError> {
        parts::parts(&self.store, id)
    }

    fn remove_snapshot(&self, id: &str) -> Result<(), EngineError> {
        match self.store.remove(id) {
            Ok(()) | Err(jiffy_snapshot::SnapshotError::Missing(_)) => Ok(()),
            Err(e) => Err(EngineError::failed(e)),
        }
    }
}
