//! [`GvisorEngine`]: starts sandboxes on gVisor from the templates and snapshots of a data
//! directory. A helper program (`jiffy-gvisor`) runs one sentry process per sandbox.
//!
//! The *sentry* is gVisor's kernel in user space, one process per sandbox. A *slot* is a network
//! namespace with its devices and rules. Slots are prepared in advance, and each is assigned to one
//! guest.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

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
    Capabilities, DetachedGuest, Engine, EngineDescription, EngineError, ExitReason, GVISOR, Guest,
    GuestHandle, NetworkRules, SandboxIdentity, SandboxSize, SnapshotFiles, TemplateState,
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

/// Name of the directory of snapshots, in the data directory.
const SNAPSHOTS: &str = "gvisor";

/// Name of the directory of sandboxes, in the runtime directory.
const SANDBOXES: &str = "gvisor";

/// Sandboxes on gVisor, started from the templates and snapshots of one host.
pub struct GvisorEngine {
    templates: Arc<TemplateCache>,
    store: SnapshotStore,
    /// Runtime, or the reason why gVisor cannot be used on this host.
    runtime: Result<Runtime, String>,
    /// `None` if sandboxes have no network card.
    network: Option<Network>,
}

/// gVisor runtime of this process.
struct Runtime {
    helper: Helper,
    version: String,
}

impl Runtime {
    /// Starts the runtime of a daemon.
    async fn start(host: &Host) -> Result<Self, EngineError> {
        // The daemon's decision on control groups applies to VMMs and sentries.
        let limited = host.programs().vmm.is_limited() && can_limit();
        let directory = host.home().run().join(SANDBOXES);
        Self::with(Helper::new(program(host)?, directory, limited)).await
    }

    /// Starts a runtime whose sandboxes are terminated with this process. The sandboxes use
    /// `directory`, which must not be used by another process.
    async fn start_ephemeral(host: &Host, directory: PathBuf) -> Result<Self, EngineError> {
        // Only a daemon decides on control groups for VMMs, so check the control groups of the
        // host.
        let limited = can_limit() && matches!(Cgroups::find(), Ok(Some(_)));
        Self::with(Helper::ephemeral(program(host)?, directory, limited)).await
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

    /// Opens an engine whose sandboxes are terminated with this process. Sandboxes and snapshots
    /// are stored in `directory`, which must not be used by another process. The directory is
    /// removed with the sandboxes.
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
            reason: format!("cannot use the engine gvisor on this host: {why}"),
        })
    }

    /// Checks that gVisor can be used on this host.
    pub(crate) fn check_usable(&self) -> Result<(), EngineError> {
        self.runtime().map(drop)
    }

    /// Returns the specification for booting a template. `lease` is the network slot of the
    /// sandbox.
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
            // The gateway of the slot resolves names. Without a slot there is no resolver.
            dns: lease
                .map(|_| jiffy_network::guest::GATEWAY.into())
                .into_iter()
                .collect(),
        })
    }

    /// Returns the manifest of snapshot `id`, if this version of gVisor can read the snapshot.
    fn manifest(&self, id: &str) -> Result<GvisorManifest, EngineError> {
        let manifest = self.store.get(id).map_err(EngineError::failed)?;
        let version = &self.runtime()?.version;
        // gVisor does not promise that a version reads checkpoints of another one.
        if manifest.version == *version {
            Ok(manifest)
        } else {
            Err(EngineError::Failed {
                reason: format!(
                    "snapshot {id} was taken with gVisor {} and may be unreadable for version {version}; restore it with the version of jiffy that took it",
                    manifest.version
                ),
            })
        }
    }
}

/// Returns whether sandboxes can have control groups. gVisor creates them at the top of the
/// hierarchy, which requires root of the host. Without control groups, the sentry limits the
/// memory.
fn can_limit() -> bool {
    jiffy_rootless::current().is_none()
}

/// Returns the helper program if it can create sandboxes on this host. Only root can create their
/// namespaces, unless the kernel permits user namespaces.
pub(crate) fn program(host: &Host) -> Result<PathBuf, EngineError> {
    let program = host
        .programs()
        .gvisor
        .clone()
        .map_err(EngineError::failed)?;
    if nix::unistd::Uid::effective().is_root() {
        return Ok(program);
    }
    match jiffy_rootless::usable() {
        Ok(()) => Ok(program),
        Err(missing) => Err(EngineError::Failed {
            reason: format!(
                "gVisor needs root, or user namespaces, to isolate sandboxes: {}; {}",
                missing.description, missing.remedy
            ),
        }),
    }
}

/// Returns the error of an operation on `sandbox`. The operation may have failed because the
/// sandbox ended.
fn operation_error(error: GvisorError, sandbox: &Sandbox) -> EngineError {
    if let GvisorError::TooLarge { needed, most } = error {
        return EngineError::SnapshotTooLarge { needed, most };
    }
    // The error itself does not show whether the sandbox has exited.
    if sandbox.has_ended() {
        EngineError::Ended {
            end: ExitReason::VmmDied {
                status: error.to_string(),
            },
        }
    } else {
        EngineError::failed(error)
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
                disk_snapshot: false,
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
        // A *boot snapshot* is the snapshot of a template from which a sandbox is booted instead of
        // restored. `record_working_set` marks it.
        let is_boot = self.store.is_boot(id);
        let mut step = steps::begin("network_slot");
        let lease = if manifest.net {
            Some(guest_nic::required(self.network.as_ref(), NicKind::Veth, id).await?)
        } else {
            None
        };
        let mut boot = self.spec(&prepared, manifest.size, lease.as_ref())?;
        // The checkpoint refers to the agent image with which the sandbox was booted.
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
        // A boot takes half the time and half the memory of a restore on gVisor, because a restored
        // sentry retains the data that it read. A template without startup commands is therefore
        // booted instead of restored.
        if self.prepare(template).await?.startup.is_empty() {
            self.store.mark_boot(id).map_err(EngineError::failed)
        } else {
            Ok(())
        }
    }

    async fn adopt(&self, orphan: &DetachedGuest) -> Result<Arc<dyn Guest>, EngineError> {
        let helper = &self.runtime()?.helper;
        let handle = GvisorHandle::read(&orphan.handle)?;
        // The sandbox continues to use its images even if they can no longer be opened by name.
        let prepared = self
            .templates
            .prepare_version(&handle.adopt_spec.boot.template);
        let prepared = prepared.await.ok();
        // The sandbox is terminated if the adoption fails.
        let sandbox = Sandbox::adopt(helper, handle.adopt_spec)
            .await
            .map_err(EngineError::failed)?;
        // The slot is adopted after the sandbox: if the adoption of the sandbox fails, the slot is
        // not adopted either.
        let lease = guest_nic::adopted(self.network.as_ref(), handle.slot, &orphan.network).await;
        let store = self.store.clone();
        Ok(Arc::new(GvisorGuest::new(sandbox, store, prepared, lease)))
    }

    async fn end_unadopted(&self, known: &[GuestHandle]) -> Result<usize, EngineError> {
        // Without a runtime no sandbox can be adopted, so all of them are terminated.
        let Ok(Runtime { helper, .. }) = &self.runtime else {
            let ended = known.iter().filter(|handle| end_unreachable(handle));
            let ended = ended.count();
            if let Some(network) = &self.network {
                // No sandbox remains, so no slot is retained.
                network.reclaim(NicKind::Veth, &[]);
            }
            return Ok(ended);
        };
        let handles: Vec<GvisorHandle> = known
            .iter()
            .filter_map(|handle| GvisorHandle::read(handle).ok())
            .collect();
        let slots: Vec<u32> = handles.iter().filter_map(|handle| handle.slot).collect();
        let ids: Vec<String> = handles
            .into_iter()
            .map(|handle| handle.adopt_spec.boot.id)
            .collect();
        let ended = Sandbox::end_unadopted(helper, &ids).await;
        if let Some(network) = &self.network {
            // Afterwards, so that no sandbox uses a reclaimed slot. Known sandboxes retain their
            // slots.
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
