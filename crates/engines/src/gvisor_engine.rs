//! The engine `gvisor` in the host's terms: templates and snapshots of a data directory.

mod guest;
mod import;
mod parts;
mod snapshot_files;

use crate::guest_nic::{self};
use crate::host::{Host, PreparedTemplate};
use crate::template_cache::{TemplateCache, chain};
use async_trait::async_trait;
use guest::{GvisorGuest, GvisorHandle, UnassignedGvisorGuest, end_unreachable};
use jiffy_engine_api::{
    Capabilities, Engine, EngineDescription, EngineError, ExitReason, GVISOR, Guest, GuestHandle,
    KeptGuest, NetworkRules, SandboxIdentity, SandboxSize, SnapshotFiles, TemplateState,
    UnassignedGuest, new_id, steps,
};
use jiffy_gvisor_engine::{
    BootSpec, GvisorError, GvisorManifest, Helper, RestoreSpec, Sandbox, SnapshotStore,
    UnassignedSandbox,
};
use jiffy_microvm_engine::Cgroups;
use jiffy_network::{Network, NicKind, SlotLease};
use jiffy_proto::agent::SiteSettings;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Directory of the snapshots in the data directory.
const SNAPSHOTS: &str = "gvisor";

/// Directory of the sandboxes in that of running things.
const SANDBOXES: &str = "gvisor";

/// Sandboxes on gVisor, started from the templates and snapshots of one host.
pub struct GvisorEngine {
    templates: Arc<TemplateCache>,
    store: SnapshotStore,
    /// The message of the error is the reason that gVisor cannot be used on this host.
    runtime: Result<Runtime, String>,
    /// `None` if sandboxes have no network card.
    network: Option<Network>,
}

/// gVisor's runtime of this process.
struct Runtime {
    helper: Helper,
    version: String,
}

impl Runtime {
    /// Starts the runtime of a daemon.
    async fn start(host: &Host) -> Result<Self, EngineError> {
        let limited = host.programs().vmm.is_limited() && can_limit();
        let directory = host.home().run().join(SANDBOXES);
        Self::with(Helper::new(program(host)?, directory, limited)).await
    }

    /// Starts a runtime whose sandboxes end with this process. They are in `directory`, which no
    /// other process uses.
    async fn start_ephemeral(host: &Host, directory: PathBuf) -> Result<Self, EngineError> {
        // The memory of a virtual machine is limited by itself; gVisor needs a control group.
        let limited = can_limit() && matches!(Cgroups::find(), Ok(Some(_)));
        Self::with(Helper::brief(program(host)?, directory, limited)).await
    }

    async fn with(helper: Result<Helper, GvisorError>) -> Result<Self, EngineError> {
        let helper = helper.map_err(EngineError::failed)?;
        let version = helper.version().await.map_err(EngineError::failed)?;
        Ok(Self { helper, version })
    }
}

impl GvisorEngine {
    /// Opens the engine of a daemon.
    pub(crate) async fn open(
        templates: Arc<TemplateCache>,
        network: Option<Network>,
    ) -> Result<Self, EngineError> {
        let store = templates.host().home().path().join(SNAPSHOTS);
        let runtime = Runtime::start(templates.host()).await;
        Self::with(templates, &store, runtime, network)
    }

    /// Opens an engine whose sandboxes end with this process. Sandboxes and snapshots are in
    /// `directory`, which no other process uses and which is removed with the sandboxes.
    pub(crate) async fn open_ephemeral(
        templates: Arc<TemplateCache>,
        directory: &Path,
        network: Option<Network>,
    ) -> Result<Self, EngineError> {
        let runtime = Runtime::start_ephemeral(templates.host(), directory.to_owned()).await;
        Self::with(templates, &directory.join("snapshots"), runtime, network)
    }

    fn with(
        templates: Arc<TemplateCache>,
        store: &Path,
        runtime: Result<Runtime, EngineError>,
        network: Option<Network>,
    ) -> Result<Self, EngineError> {
        Ok(Self {
            templates,
            store: SnapshotStore::open(store).map_err(EngineError::failed)?,
            runtime: runtime.map_err(|e| e.to_string()),
            network,
        })
    }

    /// Returns the runtime.
    ///
    /// # Errors
    /// Fails if gVisor cannot be used on this host.
    fn runtime(&self) -> Result<&Runtime, EngineError> {
        self.runtime.as_ref().map_err(|why| EngineError::Failed {
            reason: format!("the engine gvisor cannot be used here: {why}"),
        })
    }

    /// Checks that gVisor can be used on this host.
    pub(crate) fn check_usable(&self) -> Result<(), EngineError> {
        self.runtime().map(drop)
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
        let version = &self.runtime()?.version;
        match manifest.version == *version {
            true => Ok(manifest),
            false => Err(EngineError::Failed {
                reason: format!(
                    "snapshot {id} was taken with gVisor {}, and this is {version}, which may not read it; restore it with that version of jiffy",
                    manifest.version
                ),
            }),
        }
    }
}

/// Returns whether sandboxes can have control groups: gVisor creates them at the top, where only
/// the root user of the host may. Without them the kernel of the sandbox limits its memory.
fn can_limit() -> bool {
    jiffy_rootless::current().is_none()
}

/// Returns the helper program if it can create sandboxes on this host: their namespaces are created
/// by root, or by an ordinary user where the kernel permits user namespaces.
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

/// Returns the error of an operation on `sandbox`, which may have failed because the sandbox ended.
fn operation_error(error: GvisorError, sandbox: &Sandbox) -> EngineError {
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

#[async_trait]
impl Engine for GvisorEngine {
    fn name(&self) -> &'static str {
        GVISOR
    }

    fn description(&self) -> EngineDescription {
        let why = self.runtime.as_ref().err().cloned();
        EngineDescription {
            name: GVISOR.to_owned(),
            version: self.runtime.as_ref().ok().map(|r| r.version.clone()),
            usable: why.is_none(),
            why,
            default: false,
            capabilities: Capabilities {
                snapshot: true,
                // The guest is paused while its snapshot is written.
                live_snapshot: false,
                incremental: false,
                // A restore reads all memory.
                fork_shares_memory: false,
                rollback: true,
                pause_frees_memory: true,
                connections_survive_snapshot: true,
                connections_survive_pause: false,
                verify: false,
                network: self.network.is_some(),
                disk_limits: false,
                nested_kvm: false,
                own_kernel: false,
            },
        }
    }

    fn snapshot_files(&self) -> &dyn SnapshotFiles {
        self
    }

    async fn prepare(&self, template: &str) -> Result<TemplateState, EngineError> {
        let version = &self.runtime()?.version;
        let prepared = self.templates.prepare(template).await?;
        Ok(TemplateState {
            fingerprint: format!(
                "{} {} gvisor {version}{}",
                prepared.template_version(),
                prepared.version(),
                if self.network.is_some() { " net" } else { "" }
            ),
            startup: prepared.template().manifest.startup.clone(),
        })
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
        template: &str,
        size: SandboxSize,
    ) -> Result<Box<dyn UnassignedGuest>, EngineError> {
        let helper = &self.runtime()?.helper;
        let prepared = self.templates.prepare(template).await?;
        let mut step = steps::begin("network_slot");
        let lease = match &self.network {
            Some(network) => {
                let lease = network.take(NicKind::Veth).await;
                Some(lease.map_err(EngineError::failed)?)
            }
            None => None,
        };
        let spec = self.spec(&prepared, size, lease.as_ref())?;
        step.next("start");
        let unassigned = UnassignedSandbox::boot(helper, &spec).await;
        Ok(Box::new(UnassignedGvisorGuest {
            sandbox: unassigned.map_err(EngineError::failed)?,
            store: self.store.clone(),
            prepared,
            lease,
        }))
    }

    async fn restore(
        &self,
        id: &str,
        _identity: Option<&SandboxIdentity>,
    ) -> Result<Box<dyn UnassignedGuest>, EngineError> {
        let helper = &self.runtime()?.helper;
        let manifest = self.manifest(id)?;
        let prepared = self.templates.prepare_version(&manifest.template).await?;
        let is_boot = self.store.is_boot(id);
        let mut step = steps::begin("network_slot");
        let lease = match manifest.net {
            true => Some(guest_nic::needed(self.network.as_ref(), NicKind::Veth, id).await?),
            false => None,
        };
        let mut boot = self.spec(&prepared, manifest.size, lease.as_ref())?;
        // The agent image that it was started with.
        boot.base = PathBuf::from(&manifest.base);
        step.next(if is_boot { "start" } else { "restore" });
        let unassigned = if is_boot {
            UnassignedSandbox::boot(helper, &boot).await
        } else {
            let spec = RestoreSpec { boot, manifest };
            UnassignedSandbox::restore(helper, &self.store, &spec).await
        };
        Ok(Box::new(UnassignedGvisorGuest {
            sandbox: unassigned.map_err(EngineError::failed)?,
            store: self.store.clone(),
            prepared,
            lease,
        }))
    }

    async fn record_working_set(
        &self,
        template: &str,
        id: &str,
        _site: &SiteSettings,
    ) -> Result<(), EngineError> {
        // A boot takes half the time of a restore here, and half the memory: the kernel that was
        // restored keeps what it read.
        match self.prepare(template).await?.startup.is_empty() {
            true => self.store.mark_boot(id).map_err(EngineError::failed),
            false => Ok(()),
        }
    }

    async fn adopt(&self, orphan: &KeptGuest) -> Result<Arc<dyn Guest>, EngineError> {
        let helper = &self.runtime()?.helper;
        let handle = GvisorHandle::read(&orphan.handle)?;
        // The sandbox continues to use images that can no longer be opened.
        let prepared = self.templates.prepare_version(&handle.estate.boot.template);
        let prepared = prepared.await.ok();
        let sandbox = Sandbox::adopt(helper, handle.estate).await;
        let sandbox = sandbox.map_err(EngineError::failed)?;
        let lease = guest_nic::adopted(self.network.as_ref(), handle.slot, &orphan.network).await;
        let store = self.store.clone();
        Ok(Arc::new(GvisorGuest::new(sandbox, store, prepared, lease)))
    }

    async fn end_unadopted(&self, known: &[GuestHandle]) -> Result<usize, EngineError> {
        let Ok(Runtime { helper, .. }) = &self.runtime else {
            let ended = known.iter().filter(|handle| end_unreachable(handle));
            let ended = ended.count();
            if let Some(network) = &self.network {
                network.reclaim(NicKind::Veth, &[]);
            }
            return Ok(ended);
        };
        let known: Vec<GvisorHandle> = known
            .iter()
            .filter_map(|handle| GvisorHandle::read(handle).ok())
            .collect();
        let slots: Vec<u32> = known.iter().filter_map(|handle| handle.slot).collect();
        let ids: Vec<String> = known.into_iter().map(|w| w.estate.boot.id).collect();
        let ended = Sandbox::end_unadopted(helper, &ids).await;
        if let Some(network) = &self.network {
            network.reclaim(NicKind::Veth, &slots);
        }
        ended.map_err(EngineError::failed)
    }

    async fn close(&self) {
        if let Ok(runtime) = &self.runtime {
            runtime.helper.close().await;
        }
    }
}
