//! All engines of a host as one. New sandboxes come up on one of them; what is there stays with the
//! engine that it is of.

mod guest;

pub use guest::{HostGuest, UnassignedHostGuest};

use crate::gvisor_engine::{self, GvisorEngine, SNAPSHOTS};
use crate::host::{Host, PreparedTemplate};
use crate::microvm_engine::{LazyStore, MicroVmEngine};
use crate::template_cache::TemplateCache;
use jiffy_engine_api::{
    AfterSnapshot, CaptureNotice, Engine, EngineDescription, EngineError, EngineName,
    ExistingSnapshot, FoldPace, FoldPreparation, FoldResult, GuestHandle, ImportedFiles, KeptGuest,
    LineageLimits, NetworkRules, RollbackFailure, SandboxIdentity, SandboxSize, SnapshotImport,
    SnapshotParts, SnapshotTimes, SnapshotWalk, Startup, VerifiedSnapshot,
};
use jiffy_gvisor_engine::SnapshotStore;
use jiffy_network::{Network, NicKind};
use jiffy_proto::agent::SiteSettings;
use std::path::Path;
use std::sync::Arc;

/// The engines of a host.
pub struct HostEngine {
    templates: Arc<TemplateCache>,
    microvm: MicroVmEngine,
    /// Why it cannot be used, in words.
    gvisor: Result<GvisorEngine, String>,
    /// Its snapshots, which are there also where it cannot be used.
    gvisor_store: SnapshotStore,
    /// None: sandboxes have no network card.
    network: Option<Network>,
    chosen: EngineName,
}

impl HostEngine {
    /// The engines of `host`; new sandboxes come up on the one that is `chosen`, which must be
    /// usable if it is gVisor. Memory that has not arrived comes from `lazy`.
    pub async fn open(
        host: Host,
        network: Option<Network>,
        chosen: EngineName,
        lazy: Option<LazyStore>,
    ) -> Result<Self, EngineError> {
        let templates = Arc::new(TemplateCache::new(host));
        let microvm = MicroVmEngine::on(templates.clone())?
            .with_network(network.clone())
            .with_lazy_store(lazy);
        let gvisor_store = SnapshotStore::open(templates.host().home().path().join(SNAPSHOTS));
        let gvisor_store = gvisor_store.map_err(EngineError::failed)?;
        let gvisor =
            GvisorEngine::on(templates.clone(), gvisor_store.clone(), network.clone()).await;
        let gvisor = match (gvisor, chosen) {
            (Err(e), EngineName::Gvisor) => return Err(e),
            (found, _) => found.map_err(|e| e.to_string()),
        };
        Ok(Self {
            templates,
            microvm,
            gvisor,
            gvisor_store,
            network,
            chosen,
        })
    }

    /// The engine that is `chosen`, beside a daemon's: its guests end with this process, and what
    /// is theirs alone is in `directory`.
    pub async fn ephemeral(
        host: Host,
        network: Option<Network>,
        chosen: EngineName,
        directory: &Path,
    ) -> Result<Self, EngineError> {
        let templates = Arc::new(TemplateCache::new(host));
        let microvm = MicroVmEngine::on(templates.clone())?.with_network(network.clone());
        let gvisor_store = SnapshotStore::open(directory.join("snapshots"));
        let gvisor_store = gvisor_store.map_err(EngineError::failed)?;
        let gvisor = match chosen {
            EngineName::MicroVm => Err("it was not asked for".to_owned()),
            EngineName::Gvisor => Ok(GvisorEngine::ephemeral(
                templates.clone(),
                gvisor_store.clone(),
                directory.to_owned(),
                network.clone(),
            )
            .await?),
        };
        Ok(Self {
            templates,
            microvm,
            gvisor,
            gvisor_store,
            network,
            chosen,
        })
    }

    /// Takes a template that was opened already.
    pub fn hold(&self, template: &str, prepared: PreparedTemplate) -> Result<(), EngineError> {
        self.templates.hold(template, Arc::new(prepared))
    }

    /// Its host.
    pub fn host(&self) -> &Host {
        self.templates.host()
    }

    fn gvisor(&self) -> Result<&GvisorEngine, EngineError> {
        self.gvisor.as_ref().map_err(|why| EngineError::Failed {
            reason: format!("the engine gvisor cannot be used here: {why}"),
        })
    }

    /// The engine of new sandboxes, if none is `wanted`, else that one.
    fn engine(&self, wanted: Option<&str>) -> Result<EngineRef<'_>, EngineError> {
        let name = match wanted {
            Some(name) => name
                .parse()
                .map_err(|reason| EngineError::Failed { reason })?,
            None => self.chosen,
        };
        match name {
            EngineName::MicroVm => Ok(EngineRef::MicroVm(&self.microvm)),
            EngineName::Gvisor => self.gvisor().map(EngineRef::Gvisor),
        }
    }

    /// The engine that took a snapshot of another host.
    fn of_import(&self, import: &SnapshotImport) -> Result<EngineRef<'_>, EngineError> {
        let engine = self.engine(Some(&import.engine));
        engine.map_err(|e| EngineError::Incompatible {
            reason: format!("snapshot {} cannot be restored: {e}", import.id),
        })
    }

    /// The engine that took snapshot `id`.
    fn of_snapshot(&self, id: &str) -> Result<EngineRef<'_>, EngineError> {
        match (self.gvisor_store.has(id), &self.gvisor) {
            (false, _) => Ok(EngineRef::MicroVm(&self.microvm)),
            (true, Ok(gvisor)) => Ok(EngineRef::Gvisor(gvisor)),
            (true, Err(why)) => Err(EngineError::Failed {
                reason: format!(
                    "snapshot {id} was taken with the engine gvisor, which cannot be used here: {why}"
                ),
            }),
        }
    }
}

/// One of the engines.
enum EngineRef<'a> {
    MicroVm(&'a MicroVmEngine),
    Gvisor(&'a GvisorEngine),
}

/// Does the same with whichever engine it is.
macro_rules! with {
    ($one:expr, $engine:ident => $work:expr) => {
        match $one {
            EngineRef::MicroVm($engine) => $work,
            EngineRef::Gvisor($engine) => $work,
        }
    };
}

impl Engine for HostEngine {
    type Guest = HostGuest;
    type UnassignedGuest = UnassignedHostGuest;

    fn engines(&self) -> Vec<EngineDescription> {
        let gvisor = match &self.gvisor {
            Ok(gvisor) => gvisor.engines(),
            Err(why) => vec![gvisor_engine::describe(
                self.network.is_some(),
                Some(why.clone()),
            )],
        };
        let all = self.microvm.engines().into_iter().chain(gvisor);
        let chosen = self.chosen.to_string();
        all.map(|engine| EngineDescription {
            default: engine.name == chosen,
            ..engine
        })
        .collect()
    }

    async fn fingerprint(
        &self,
        engine: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> Result<String, EngineError> {
        with!(self.engine(engine)?, one => one.fingerprint(None, template, size).await)
    }

    async fn startup(&self, template: &str) -> Result<Startup, EngineError> {
        self.microvm.startup(template).await
    }

    async fn default_size(&self, template: &str) -> Result<SandboxSize, EngineError> {
        self.microvm.default_size(template).await
    }

    fn check_network(&self, rules: &NetworkRules) -> Result<(), String> {
        self.microvm.check_network(rules)
    }

    fn network(&self) -> String {
        self.microvm.network()
    }

    async fn boot(
        &self,
        engine: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> Result<UnassignedHostGuest, EngineError> {
        match self.engine(engine)? {
            EngineRef::MicroVm(engine) => Ok(UnassignedHostGuest::MicroVm(Box::new(
                engine.boot(None, template, size).await?,
            ))),
            EngineRef::Gvisor(engine) => Ok(UnassignedHostGuest::Gvisor(Box::new(
                engine.boot(None, template, size).await?,
            ))),
        }
    }

    async fn restore(&self, template: &str, id: &str) -> Result<UnassignedHostGuest, EngineError> {
        match self.of_snapshot(id)? {
            EngineRef::MicroVm(engine) => Ok(UnassignedHostGuest::MicroVm(Box::new(
                engine.restore(template, id).await?,
            ))),
            EngineRef::Gvisor(engine) => Ok(UnassignedHostGuest::Gvisor(Box::new(
                engine.restore(template, id).await?,
            ))),
        }
    }

    async fn restore_for(
        &self,
        template: &str,
        id: &str,
        identity: &SandboxIdentity,
    ) -> Result<UnassignedHostGuest, EngineError> {
        match self.of_snapshot(id)? {
            EngineRef::MicroVm(engine) => Ok(UnassignedHostGuest::MicroVm(Box::new(
                engine.restore_for(template, id, identity).await?,
            ))),
            EngineRef::Gvisor(engine) => Ok(UnassignedHostGuest::Gvisor(Box::new(
                engine.restore_for(template, id, identity).await?,
            ))),
        }
    }

    async fn roll_back(
        &self,
        guest: &HostGuest,
        id: &str,
        identity: &SandboxIdentity,
        begin: impl FnOnce() -> bool + Send,
    ) -> Result<(), RollbackFailure> {
        let engine = self.of_snapshot(id).map_err(|e| RollbackFailure::Refused {
            reason: e.to_string(),
        })?;
        match (engine, guest) {
            (EngineRef::MicroVm(engine), HostGuest::MicroVm(guest)) => {
                engine.roll_back(guest, id, identity, begin).await
            }
            _ => Err(RollbackFailure::Refused {
                reason: "gVisor makes a new guest of a snapshot".to_owned(),
            }),
        }
    }

    async fn snapshot(
        &self,
        guest: &HostGuest,
        id: &str,
        parent: Option<&str>,
        then: AfterSnapshot,
        max: Option<u64>,
        notice: Option<CaptureNotice>,
    ) -> Result<SnapshotTimes, EngineError> {
        match guest {
            HostGuest::MicroVm(guest) => {
                let taken = self.microvm.snapshot(guest, id, parent, then, max, notice);
                taken.await
            }
            HostGuest::Gvisor(guest) => {
                let taken = self
                    .gvisor()?
                    .snapshot(guest, id, parent, then, max, notice);
                taken.await
            }
        }
    }

    async fn finish_captured(&self, guest: &HostGuest) -> Result<SnapshotTimes, EngineError> {
        match guest {
            HostGuest::MicroVm(guest) => self.microvm.finish_captured(guest).await,
            HostGuest::Gvisor(guest) => self.gvisor()?.finish_captured(guest).await,
        }
    }

    fn discard_captured(&self, id: &str) {
        self.microvm.discard_captured(id);
    }

    async fn record_working_set(
        &self,
        template: &str,
        id: &str,
        site: &SiteSettings,
    ) -> Result<(), EngineError> {
        with!(self.of_snapshot(id)?, engine => engine.record_working_set(template, id, site).await)
    }

    fn prefetch(&self, id: &str) -> Result<(), EngineError> {
        with!(self.of_snapshot(id)?, engine => engine.prefetch(id))
    }

    fn write_checksums(&self, id: &str) -> Result<(), EngineError> {
        with!(self.of_snapshot(id)?, engine => engine.write_checksums(id))
    }

    fn verify(&self, id: &str) -> Result<Vec<VerifiedSnapshot>, EngineError> {
        with!(self.of_snapshot(id)?, engine => engine.verify(id))
    }

    async fn adopt(&self, orphan: &KeptGuest) -> Result<HostGuest, EngineError> {
        match gvisor_engine::is_ours(&orphan.handle) {
            true => Ok(HostGuest::Gvisor(self.gvisor()?.adopt(orphan).await?)),
            false => Ok(HostGuest::MicroVm(self.microvm.adopt(orphan).await?)),
        }
    }

    async fn end_unadopted(&self, known: &[GuestHandle]) -> Result<usize, EngineError> {
        // Each knows its own handles, and none of the other's.
        let ended = self.microvm.end_unadopted(known).await?;
        match &self.gvisor {
            Ok(gvisor) => Ok(ended + gvisor.end_unadopted(known).await?),
            Err(_) => {
                let left = known.iter().filter(|h| gvisor_engine::is_ours(h));
                let left = left.filter(|h| gvisor_engine::end_unreachable(h)).count();
                if let Some(network) = &self.network {
                    network.reclaim(NicKind::Veth, &[]);
                }
                Ok(ended + left)
            }
        }
    }

    async fn close(&self) {
        self.microvm.close().await;
        if let Ok(gvisor) = &self.gvisor {
            gvisor.close().await;
        }
    }

    fn snapshots(&self) -> Result<Vec<String>, EngineError> {
        let mut all = self.microvm.snapshots()?;
        all.extend(self.gvisor_store.ids().map_err(EngineError::failed)?);
        Ok(all)
    }

    fn walk_snapshots(&self) -> Result<SnapshotWalk, EngineError> {
        let microvm = self.microvm.walk_snapshots()?;
        let gvisor = self.gvisor_store.walk().map_err(EngineError::failed)?;
        let gvisor = gvisor.map(|id| id.map_err(EngineError::failed));
        Ok(Box::new(microvm.chain(gvisor)))
    }

    fn is_independent(&self, id: &str) -> bool {
        self.gvisor_store.has(id) || self.microvm.is_independent(id)
    }

    fn gc(&self) -> Result<usize, EngineError> {
        self.microvm.gc()
    }

    fn snapshot_size(&self, id: &str) -> Option<u64> {
        match self.gvisor_store.has(id) {
            true => self.gvisor_store.size(id),
            false => self.microvm.snapshot_size(id),
        }
    }

    fn damage(&self, id: &str) -> Option<String> {
        match self.gvisor_store.has(id) {
            true => self.gvisor_store.find_damage(id),
            false => self.microvm.damage(id),
        }
    }

    fn lies_on(&self, id: &str, ancestor: &str) -> bool {
        !self.gvisor_store.has(id) && self.microvm.lies_on(id, ancestor)
    }

    fn merge_growth(&self, id: &str, limits: LineageLimits) -> Option<u64> {
        match self.gvisor_store.has(id) {
            true => None,
            false => self.microvm.merge_growth(id, limits),
        }
    }

    async fn merge(&self, id: &str, limits: LineageLimits) -> Result<(), EngineError> {
        match self.gvisor_store.has(id) {
            true => Ok(()),
            false => self.microvm.merge(id, limits).await,
        }
    }

    fn parent_on_disk(&self, id: &str) -> Option<String> {
        match self.gvisor_store.has(id) {
            true => None,
            false => self.microvm.parent_on_disk(id),
        }
    }

    fn prepare_fold(&self, id: &str, max_copy: u64, pace: &mut FoldPace<'_>) -> FoldResult {
        match self.gvisor_store.has(id) {
            true => Ok(FoldPreparation::Refused),
            false => self.microvm.prepare_fold(id, max_copy, pace),
        }
    }

    fn is_current(&self, template: &str, id: &str) -> bool {
        match self.of_snapshot(id) {
            Ok(one) => with!(one, engine => engine.is_current(template, id)),
            // A snapshot stays if this cannot be told.
            Err(_) => true,
        }
    }

    async fn check_import(&self, import: &SnapshotImport) -> Result<(), EngineError> {
        with!(self.of_import(import)?, engine => engine.check_import(import).await)
    }

    async fn import_snapshot(
        &self,
        import: &SnapshotImport,
        files: ImportedFiles,
        existing: ExistingSnapshot,
    ) -> Result<(), EngineError> {
        let engine = self.of_import(import)?;
        with!(engine, engine => engine.import_snapshot(import, files, existing).await)
    }

    fn restores_lazily(&self, engine: &str) -> bool {
        engine == jiffy_engine_api::MICROVM && self.microvm.restores_lazily(engine)
    }

    fn want_all(&self, id: &str) -> Result<(), EngineError> {
        match self.gvisor_store.has(id) {
            true => Ok(()),
            false => self.microvm.want_all(id),
        }
    }

    fn missing_memory(&self, id: &str) -> Result<Option<String>, EngineError> {
        match self.gvisor_store.has(id) {
            true => Ok(None),
            false => self.microvm.missing_memory(id),
        }
    }

    async fn complete_memory(&self, id: &str) -> Result<(), EngineError> {
        match self.gvisor_store.has(id) {
            true => Ok(()),
            false => self.microvm.complete_memory(id).await,
        }
    }

    fn snapshot_parts(&self, id: &str) -> Result<SnapshotParts, EngineError> {
        match self.gvisor_store.has(id) {
            true => gvisor_engine::parts(&self.gvisor_store, id),
            false => self.microvm.snapshot_parts(id),
        }
    }

    fn remove_snapshot(&self, id: &str) -> Result<(), EngineError> {
        match self.gvisor_store.has(id) {
            true => self.gvisor_store.remove(id).map_err(EngineError::failed),
            false => self.microvm.remove_snapshot(id),
        }
    }
}
