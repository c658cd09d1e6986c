//! The engine `gvisor` in the host's terms: templates and snapshots of a data directory.

mod guest;
mod import;
mod parts;

pub use guest::{GvisorGuest, UnassignedGvisorGuest};
pub(crate) use guest::{end_unreachable, is_ours};
pub(crate) use parts::parts;

use crate::guest_nic::{self};
use crate::host::{Host, PreparedTemplate};
use crate::template_cache::{TemplateCache, chain};
use guest::GvisorHandle;
use jiffy_engine_api::{
    AfterSnapshot, Capabilities, CaptureNotice, Engine, EngineDescription, EngineError,
    ExistingSnapshot, ExitReason, GVISOR, GuestHandle, ImportedFiles, KeptGuest, NetworkRules,
    SandboxSize, SnapshotImport, SnapshotParts, SnapshotTimes, SnapshotWalk, Startup,
    VerifiedSnapshot, new_id,
};
use jiffy_gvisor_engine::{
    BootSpec, GvisorError, GvisorManifest, Helper, RestoreSpec, Sandbox, SnapshotStore,
    UnassignedSandbox,
};
use jiffy_microvm_engine::Cgroups;
use jiffy_network::{Network, NicKind, SlotLease};
use jiffy_proto::agent::SiteSettings;
use std::path::PathBuf;
use std::sync::Arc;

/// Directory of the snapshots in the data directory.
pub(crate) const SNAPSHOTS: &str = "gvisor";

/// Directory of the sandboxes in that of running things.
const SANDBOXES: &str = "gvisor";

/// Sandboxes on gVisor, made from the templates and snapshots of one host.
pub struct GvisorEngine {
    templates: Arc<TemplateCache>,
    store: SnapshotStore,
    helper: Helper,
    version: String,
    /// None: sandboxes have no network card.
    network: Option<Network>,
}

impl GvisorEngine {
    /// The engine of the host of `shelf`. Fails if gVisor cannot be used.
    pub(crate) async fn on(
        templates: Arc<TemplateCache>,
        store: SnapshotStore,
        network: Option<Network>,
    ) -> Result<Self, EngineError> {
        let host = templates.host();
        let limited = host.programs().vmm.is_limited() && can_limit();
        let directory = host.home().run().join(SANDBOXES);
        let helper = Helper::new(program(host)?, directory, limited);
        let helper = helper.map_err(EngineError::failed)?;
        Self::with(templates, store, helper, network).await
    }

    /// An engine beside a daemon's, for sandboxes that end with this process. They are in
    /// `directory`, which is theirs alone and goes with them, and so is `store`.
    pub(crate) async fn ephemeral(
        templates: Arc<TemplateCache>,
        store: SnapshotStore,
        directory: PathBuf,
        network: Option<Network>,
    ) -> Result<Self, EngineError> {
        // A virtual machine has no more than its memory; here it takes a control group to see to
        // that.
        let limited = can_limit() && matches!(Cgroups::find(), Ok(Some(_)));
        let helper = Helper::brief(program(templates.host())?, directory, limited);
        let helper = helper.map_err(EngineError::failed)?;
        Self::with(templates, store, helper, network).await
    }

    async fn with(
        templates: Arc<TemplateCache>,
        store: SnapshotStore,
        helper: Helper,
        network: Option<Network>,
    ) -> Result<Self, EngineError> {
        let version = helper.version().await.map_err(EngineError::failed)?;
        Ok(Self {
            templates,
            store,
            helper,
            version,
            network,
        })
    }

    fn spec(
        &self,
        prepared: &PreparedTemplate,
        size: SandboxSize,
        lease: Option<&SlotLease>,
    ) -> Result<BootSpec, EngineError> {
        size.check().map_err(EngineError::failed)?;
        let images = &prepared.template().images;
        Ok(BootSpec {
            id: new_id().map_err(EngineError::failed)?,
            base: prepared.agent_root().map_err(chain)?,
            images: images.iter().map(|image| image.path.clone()).collect(),
            size,
            template: prepared.image_name().to_owned(),
            namespace: lease.and_then(SlotLease::namespace),
            dns: lease
                .map(|_| jiffy_network::guest::GATEWAY.into())
                .into_iter()
                .collect(),
        })
    }

    fn manifest(&self, id: &str) -> Result<GvisorManifest, EngineError> {
        let manifest = self.store.get(id).map_err(EngineError::failed)?;
        match manifest.version == self.version {
            true => Ok(manifest),
            false => Err(EngineError::Failed {
                reason: format!(
                    "snapshot {id} was taken with gVisor {}, and this is {}, which may not read it; restore it with that version of jiffy",
                    manifest.version, self.version
                ),
            }),
        }
    }
}

/// Tells if sandboxes can have control groups: gVisor makes them at the top, where only the host's
/// root may. Without them the sandbox's kernel sees to its memory.
fn can_limit() -> bool {
    jiffy_rootless::current().is_none()
}

/// The helper program, if sandboxes of it can be made here: namespaces isolate them, which root
/// makes, or an ordinary user where the kernel lets him be root of one of his own.
pub(crate) fn program(host: &Host) -> Result<PathBuf, EngineError> {
    let program = host.programs().gvisor.clone();
    let program = program.map_err(EngineError::failed)?;
    if nix::unistd::Uid::effective().is_root() {
        return Ok(program);
    }
    match jiffy_rootless::usable() {
        Ok(()) => Ok(program),
        Err(missing) => Err(EngineError::Failed {
            reason: format!(
                "gVisor needs root, or user namespaces, to isolate sandboxes: {}; {}",
                missing.what, missing.remedy
            ),
        }),
    }
}

fn ended(error: GvisorError, sandbox: &Sandbox) -> EngineError {
    if let GvisorError::TooLarge { needed, most } = error {
        return EngineError::SnapshotTooLarge { needed, most };
    }
    match sandbox.has_ended() {
        true => EngineError::Ended {
            end: ExitReason::VmmDied {
                status: error.to_string(),
            },
        },
        false => EngineError::failed(error),
    }
}

/// Describes the engine, and why it cannot be used here if so.
pub(crate) fn describe(network: bool, why: Option<String>) -> EngineDescription {
    EngineDescription {
        name: GVISOR.to_owned(),
        version: None,
        usable: why.is_none(),
        why,
        default: false,
        capabilities: Capabilities {
            snapshot: true,
            // It stands still while it is written.
            live_snapshot: false,
            incremental: false,
            // A restore reads all of it.
            fork_shares_memory: false,
            rollback: true,
            pause_frees_memory: true,
            connections_survive_snapshot: true,
            connections_survive_pause: false,
            verify: false,
            network,
            disk_limits: false,
            nested_kvm: false,
            own_kernel: false,
        },
    }
}

impl Engine for GvisorEngine {
    type Guest = GvisorGuest;
    type UnassignedGuest = UnassignedGvisorGuest;

    fn engines(&self) -> Vec<EngineDescription> {
        let network = self.network.is_some();
        vec![EngineDescription {
            version: Some(self.version.clone()),
            default: true,
            ..describe(network, None)
        }]
    }

    async fn fingerprint(
        &self,
        _engine: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> Result<String, EngineError> {
        let prepared = self.templates.prepare(template).await?;
        Ok(format!(
            "{} {} gvisor {} {}c{}m{}d{}",
            prepared.template_version(),
            prepared.version(),
            self.version,
            size.vcpus,
            size.memory_mib,
            size.disk_mib,
            if self.network.is_some() { " net" } else { "" }
        ))
    }

    async fn startup(&self, template: &str) -> Result<Startup, EngineError> {
        let prepared = self.templates.prepare(template).await?;
        Ok(prepared.template().manifest.startup.clone())
    }

    async fn default_size(&self, template: &str) -> Result<SandboxSize, EngineError> {
        self.templates.host().default_size(template).map_err(chain)
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
    ) -> Result<UnassignedGvisorGuest, EngineError> {
        let prepared = self.templates.prepare(template).await?;
        let lease = match &self.network {
            Some(network) => {
                let lease = network.take(NicKind::Veth).await;
                Some(lease.map_err(EngineError::failed)?)
            }
            None => None,
        };
        let spec = self.spec(&prepared, size, lease.as_ref())?;
        let coming = UnassignedSandbox::boot(&self.helper, &spec).await;
        Ok(UnassignedGvisorGuest {
            coming: coming.map_err(EngineError::failed)?,
            prepared,
            lease,
        })
    }

    async fn restore(
        &self,
        _template: &str,
        id: &str,
    ) -> Result<UnassignedGvisorGuest, EngineError> {
        let manifest = self.manifest(id)?;
        let prepared = self.templates.prepare_version(&manifest.template).await?;
        let is_boot = self.store.is_boot(id);
        let lease = match manifest.net {
            true => Some(guest_nic::needed(self.network.as_ref(), NicKind::Veth, id).await?),
            false => None,
        };
        let mut boot = self.spec(&prepared, manifest.size, lease.as_ref())?;
        // The very agent that it was started with.
        boot.base = PathBuf::from(&manifest.base);
        let coming = if is_boot {
            UnassignedSandbox::boot(&self.helper, &boot).await
        } else {
            let spec = RestoreSpec { boot, manifest };
            UnassignedSandbox::restore(&self.helper, &self.store, &spec).await
        };
        Ok(UnassignedGvisorGuest {
            coming: coming.map_err(EngineError::failed)?,
            prepared,
            lease,
        })
    }

    async fn snapshot(
        &self,
        guest: &GvisorGuest,
        id: &str,
        _parent: Option<&str>,
        then: AfterSnapshot,
        max_bytes: Option<u64>,
        _notice: Option<CaptureNotice>,
    ) -> Result<SnapshotTimes, EngineError> {
        let resume = then == AfterSnapshot::Resume;
        let sandbox = &guest.sandbox;
        let taken = sandbox.snapshot(&self.store, id, resume, max_bytes).await;
        let (stopped_us, total_us) = taken.map_err(|e| ended(e, &guest.sandbox))?;
        Ok(SnapshotTimes {
            stopped_us,
            total_us,
        })
    }

    async fn record_working_set(
        &self,
        template: &str,
        id: &str,
        _site: &SiteSettings,
    ) -> Result<(), EngineError> {
        // A boot takes half the time of a restore here, and half the memory: the kernel that was
        // restored keeps what it read.
        match self.startup(template).await?.is_empty() {
            true => self.store.mark_boot(id).map_err(EngineError::failed),
            false => Ok(()),
        }
    }

    fn prefetch(&self, id: &str) -> Result<(), EngineError> {
        self.store.warm(id).map_err(EngineError::failed)
    }

    fn verify(&self, _id: &str) -> Result<Vec<VerifiedSnapshot>, EngineError> {
        Err(EngineError::Unsupported {
            engine: GVISOR,
            what: "compare snapshots with checksums",
            instead: Some("the engine microvm"),
        })
    }

    async fn adopt(&self, orphan: &KeptGuest) -> Result<GvisorGuest, EngineError> {
        let handle = GvisorHandle::read(&orphan.handle)?;
        // Images that cannot be opened any more are still the sandbox's.
        let prepared = self.templates.prepare_version(&handle.estate.boot.template);
        let prepared = prepared.await.ok();
        let sandbox = Sandbox::adopt(&self.helper, handle.estate).await;
        let sandbox = sandbox.map_err(EngineError::failed)?;
        let lease = guest_nic::adopted(self.network.as_ref(), handle.slot, &orphan.network).await;
        Ok(GvisorGuest::new(sandbox, prepared, lease))
    }

    async fn end_unadopted(&self, known: &[GuestHandle]) -> Result<usize, EngineError> {
        let known: Vec<GvisorHandle> = known
            .iter()
            .filter_map(|handle| GvisorHandle::read(handle).ok())
            .collect();
        let slots: Vec<u32> = known.iter().filter_map(|handle| handle.slot).collect();
        let ids: Vec<String> = known.into_iter().map(|w| w.estate.boot.id).collect();
        let ended = Sandbox::end_unadopted(&self.helper, &ids).await;
        if let Some(network) = &self.network {
            network.reclaim(NicKind::Veth, &slots);
        }
        ended.map_err(EngineError::failed)
    }

    async fn close(&self) {
        self.helper.close().await;
    }

    fn snapshots(&self) -> Result<Vec<String>, EngineError> {
        self.store.ids().map_err(EngineError::failed)
    }

    fn damage(&self, id: &str) -> Option<String> {
        self.store.find_damage(id)
    }

    fn is_independent(&self, _id: &str) -> bool {
        true
    }

    fn walk_snapshots(&self) -> Result<SnapshotWalk, EngineError> {
        let walk = self.store.walk().map_err(EngineError::failed)?;
        Ok(Box::new(walk.map(|id| id.map_err(EngineError::failed))))
    }

    fn snapshot_size(&self, id: &str) -> Option<u64> {
        self.store.size(id)
    }

    fn is_current(&self, template: &str, id: &str) -> bool {
        let taken = self.store.get(id).map(|manifest| manifest.template);
        self.templates.serves(template, taken.ok().as_deref())
    }

    async fn check_import(&self, import: &SnapshotImport) -> Result<(), EngineError> {
        self.can_restore(import).await.map(drop)
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
        parts(&self.store, id)
    }

    fn remove_snapshot(&self, id: &str) -> Result<(), EngineError> {
        self.store.remove(id).map_err(EngineError::failed)
    }
}
