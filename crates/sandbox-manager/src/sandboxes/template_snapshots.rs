//! Template snapshots: a template is booted once, and restored from its snapshot afterwards.
//!
//! The *warm pool* has guests that were started in advance and wait for a create.
//!
//! The *site* is the network in which the sandboxes run. Its settings are certificate authorities
//! and a proxy.
//!
//! A *pin* protects a snapshot from garbage collection. A *retired* snapshot is not used for new
//! sandboxes. The *identity* of a guest consists of its id, host name, entropy and clock.

mod retirement;

use super::create::GuestOrigin;
use super::snapshot_catalog::SnapshotPin;
use super::{OperationError, Sandboxes, SandboxesInner, Snapshots, WarmPool};
use crate::quota::QuotaPermit;
use crate::sandbox::Sandbox;
use crate::site;
use crate::snapshot::Snapshot;
use crate::startup::start_up;
use jiffy_api_types::SnapshotPurpose;
use jiffy_engine_api::{
    AfterSnapshot, BootMode, Engine, EngineError, Guest, SandboxIdentity, SandboxSize, Startup,
    new_id, now_ms, steps,
};
use jiffy_proto::agent::SiteSettings;
use parking_lot::Mutex;
use sha1::{Digest, Sha1};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

/// Snapshots of booted templates, from which new sandboxes start.
#[derive(Clone, Copy)]
pub struct TemplateSnapshots<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Returns the operations on template snapshots.
    pub fn templates(&self) -> TemplateSnapshots<'_> {
        TemplateSnapshots(&self.0)
    }
}

/// State of template snapshots.
pub(super) struct TemplateSnapshotState {
    /// Locks of template snapshots that are being created, by fingerprint.
    creation_locks: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    /// Last use of template snapshots, by id.
    uses: Mutex<HashMap<String, Instant>>,
    /// Part of each fingerprint that identifies the site settings. Empty without settings.
    site_mark: String,
}

impl TemplateSnapshotState {
    /// Creates the state for template snapshots that contain the settings `site`.
    pub fn new(site: &SiteSettings) -> Self {
        Self {
            creation_locks: Mutex::default(),
            uses: Mutex::default(),
            site_mark: site_mark(site),
        }
    }

    fn lock_of(&self, fingerprint: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.creation_locks.lock();
        locks.entry(fingerprint.to_owned()).or_default().clone()
    }

    /// Records that a snapshot is used now.
    pub fn record_use(&self, snapshot: &str) {
        let mut uses = self.uses.lock();
        uses.insert(snapshot.to_owned(), Instant::now());
    }

    /// Returns the last use of each snapshot since the start of the daemon.
    pub fn uses(&self) -> HashMap<String, Instant> {
        self.uses.lock().clone()
    }

    /// Removes the recorded last use of a snapshot that is being retired.
    pub fn forget(&self, snapshot: &str) {
        self.uses.lock().remove(snapshot);
    }
}

/// Returns a hash of the settings that are contained in every template snapshot.
fn site_mark(site: &SiteSettings) -> String {
    if site.is_empty() {
        return String::new();
    }
    // Serialising strings cannot fail.
    let text = serde_json::to_vec(site).unwrap_or_default();
    let hash = Sha1::digest(&text);
    let hash: String = hash.iter().map(|b| format!("{b:02x}")).collect();
    format!(" site {hash}")
}

impl TemplateSnapshots<'_> {
    /// Returns a fingerprint of all inputs of guests of `template` with this size: image, kernel,
    /// agent, VMM. Does not include the site settings, unlike the fingerprint under which the
    /// snapshot is found.
    pub async fn fingerprint(
        self,
        template: &str,
        size: SandboxSize,
    ) -> Result<String, OperationError> {
        let engine = self.0.engines.default_engine();
        let state = engine.prepare(template).await;
        let state = state.map_err(failed_to_use(template))?;
        Ok(state.snapshot_fingerprint(size))
    }

    /// Boots `template` with this size unless it has a snapshot. The start command is ready when
    /// this function returns.
    pub async fn make_ready(
        self,
        template: &str,
        size: SandboxSize,
    ) -> Result<Snapshot, OperationError> {
        let engine = self.0.engines.default_engine();
        let fingerprint = self.snapshot_key(engine, template, size).await?;
        let (id, _pin) = self.snapshot(engine, template, size, &fingerprint).await?;
        Ok(Snapshots(self.0).pin(&id)?.0)
    }

    /// Returns an unassigned guest of `template` on `engine`: from the warm pool, or restored from
    /// the template's snapshot, which is taken first if it is missing. The warm pool exists for the
    /// default engine only. The caller assigns `identity`; the engine may already use it for the
    /// restore.
    pub(super) async fn origin(
        self,
        engine: &Arc<dyn Engine>,
        template: &str,
        size: SandboxSize,
        identity: &SandboxIdentity,
    ) -> Result<GuestOrigin, OperationError> {
        let fingerprint = self.snapshot_key(engine, template, size).await?;
        if let Some((unassigned, snapshot)) = self.0.pool.take(&fingerprint) {
            self.0.template_snapshots.record_use(&snapshot);
            WarmPool(self.0).refill(&fingerprint, template, &snapshot);
            return Ok(GuestOrigin {
                unassigned,
                mode: BootMode::WarmPool,
                snapshot: Some(snapshot),
                restore_reason: None,
                claim: None,
            });
        }
        match self.snapshot(engine, template, size, &fingerprint).await {
            // The pin protects the snapshot from garbage collection, even if it is retired
            // concurrently, until the guest is restored.
            Ok((snapshot, _pin)) => {
                self.0.template_snapshots.record_use(&snapshot);
                let origin = Snapshots(self.0)
                    .origin(&snapshot, BootMode::Snapshot, identity)
                    .await?;
                if Arc::ptr_eq(engine, self.0.engines.default_engine()) {
                    WarmPool(self.0).refill(&fingerprint, template, &snapshot);
                }
                Ok(origin)
            }
            // The engine takes no snapshots, so every guest of it boots.
            Err(OperationError::Engine {
                source: EngineError::Unsupported { .. },
                ..
            }) => Ok(GuestOrigin {
                unassigned: engine
                    .boot(template, size)
                    .await
                    .map_err(failed_to_use(template))?,
                mode: BootMode::Cold,
                snapshot: None,
                restore_reason: None,
                claim: None,
            }),
            Err(e) => Err(e),
        }
    }

    /// Creates the snapshot of `template` in `size` if it is missing, and refills its pool bucket.
    pub(super) async fn cache(
        self,
        template: &str,
        size: SandboxSize,
    ) -> Result<(), OperationError> {
        let engine = self.0.engines.default_engine();
        let fingerprint = self.snapshot_key(engine, template, size).await?;
        let (snapshot, _pin) = self.snapshot(engine, template, size, &fingerprint).await?;
        WarmPool(self.0).refill(&fingerprint, template, &snapshot);
        Ok(())
    }

    /// Returns the fingerprint under which the snapshot of the booted template is found: all inputs
    /// of its guests, the size and the site settings of the host.
    pub(super) async fn snapshot_key(
        self,
        engine: &Arc<dyn Engine>,
        template: &str,
        size: SandboxSize,
    ) -> Result<String, OperationError> {
        let step = steps::begin("fingerprint");
        let state = engine.prepare(template).await;
        drop(step);
        let state = state.map_err(failed_to_use(template))?;
        Ok(state.snapshot_fingerprint(size) + &self.0.template_snapshots.site_mark)
    }

    /// Returns the snapshot of a booted template, with a pin that protects it.
    fn find(self, fingerprint: &str) -> Option<(String, SnapshotPin)> {
        let snapshots = self.0.catalog.read();
        let mut templates = snapshots.retained_for(SnapshotPurpose::Template, fingerprint);
        let id = templates.next()?.id.clone();
        // The snapshot is pinned while the index is locked, so that garbage collection cannot
        // remove it between the lookup and the pin.
        let pin = self.0.catalog.pin(&id);
        Some((id, pin))
    }

    /// Returns the snapshot of the booted template, pinned. If it is missing, one caller boots the
    /// template and concurrent callers wait.
    pub(super) async fn snapshot(
        self,
        engine: &Arc<dyn Engine>,
        template: &str,
        size: SandboxSize,
        fingerprint: &str,
    ) -> Result<(String, SnapshotPin), OperationError> {
        // Search without the lock first: in nearly all cases the snapshot exists.
        if let Some(found) = self.find(fingerprint) {
            return Ok(found);
        }
        let _step = steps::begin("template_snapshot");
        // Locks are never removed: they are small.
        let creation_lock = self.0.template_snapshots.lock_of(fingerprint);
        let _guard = creation_lock.lock().await;
        // Another caller may have created the snapshot while this one waited.
        if let Some(found) = self.find(fingerprint) {
            return Ok(found);
        }
        let failed = || OperationError::engine(format!("boot template `{template}`"));
        let sandbox_identity = SandboxIdentity {
            // No sandbox has this id: ids are longer.
            id: "template".to_owned(),
            // The host's site settings apply to all sandboxes. They are part of the snapshot, so
            // that programs that are already running in it have them too.
            site: site::joined(&self.0.site, &SiteSettings::default()),
            ..SandboxIdentity::default()
        };
        let unassigned = engine.boot(template, size).await;
        let unassigned = unassigned.map_err(failed())?;
        let guest = unassigned.assign_identity(&sandbox_identity).await;
        let guest = guest.map_err(failed())?;
        if let Err(e) = self.start_up(template, &guest, None).await {
            guest.stop().await;
            return Err(e);
        }
        // The guest runs a few commands once, so that the programs are in the page cache of all
        // clones. The start command comes first, so that its programs are included.
        guest.rehearse().await;
        let record = Snapshot {
            id: new_id()?,
            name: None,
            purpose: SnapshotPurpose::Template,
            sandbox: String::new(),
            owner: None,
            env: BTreeMap::new(),
            site: SiteSettings::default(),
            template: template.to_owned(),
            fingerprint: fingerprint.to_owned(),
            size,
            engine: engine.name().to_owned(),
            parent: None,
            retained: true,
            stopped_ms: 0.0,
            total_ms: 0.0,
            bytes: 0,
            created_ms: now_ms(),
            pruned: None,
            content: Default::default(),
            storing: false,
            store: Default::default(),
        };
        // A concurrent snapshot of another size may retire this snapshot as soon as it is complete.
        let pin = self.0.catalog.pin(&record.id);
        // Template snapshots belong to the host and count in no quota.
        let permit = QuotaPermit::unlimited();
        let taking = Snapshots(self.0).take(&*guest, record, AfterSnapshot::Stop, &permit, |_| {
            Vec::new()
        });
        let result = taking.await;
        guest.stop().await;
        let snapshot = result?;
        self.0.template_snapshots.record_use(&snapshot.id);
        self.retire_older(&snapshot);
        self.retire_surplus(&snapshot);
        // The *working set* is the memory that a restored guest accesses first. Later restores load
        // it in advance.
        if let Err(e) = engine
            .record_working_set(template, &snapshot.id, &sandbox_identity.site)
            .await
        {
            tracing::warn!(template, error = %e, "cannot record the working set of a template");
        }
        Ok((snapshot.id, pin))
    }

    /// Runs the start command of the template in a booted guest, and waits until it is ready.
    /// `token` is the access token of the guest's agent.
    pub(super) async fn start_up(
        self,
        template: &str,
        guest: &Arc<dyn Guest>,
        token: Option<String>,
    ) -> Result<(), OperationError> {
        let failed = || OperationError::engine(format!("boot template `{template}`"));
        let engine = self.0.engines.get(guest.engine()).map_err(failed())?;
        let startup = engine.prepare(template).await.map_err(failed())?.startup;
        self.run_startup(template, &startup, guest, token).await
    }

    /// Runs the start command of a booted sandbox. `startup` replaces the startup of the current
    /// version of its template.
    pub(super) async fn start_booted(
        self,
        sandbox: &Sandbox,
        startup: Option<Startup>,
        guest: &Arc<dyn Guest>,
    ) -> Result<(), OperationError> {
        let (template, token) = (&sandbox.template, sandbox.agent_token.clone());
        match startup {
            // The futures are boxed, because they are large.
            Some(startup) => Box::pin(self.run_startup(template, &startup, guest, token)).await,
            None => Box::pin(self.start_up(template, guest, token)).await,
        }
    }

    /// Like [`Self::start_up`], with the startup of a particular version of the template.
    async fn run_startup(
        self,
        template: &str,
        startup: &Startup,
        guest: &Arc<dyn Guest>,
        token: Option<String>,
    ) -> Result<(), OperationError> {
        if startup.is_empty() {
            return Ok(());
        }
        let failed = || OperationError::engine(format!("boot template `{template}`"));
        let _step = steps::begin("startup");
        let connector = guest.clone();
        let starting = start_up(startup, token, move |port| {
            let guest = connector.clone();
            async move { guest.connect(port).await }
        });
        // A guest that exits must not leave the caller waiting for the readiness timeout.
        tokio::select! {
            started = starting => started.map_err(|source| OperationError::Startup {
                template: template.to_owned(),
                source,
            }),
            end = guest.ended() => Err(failed()(EngineError::Ended { end })),
        }
    }
}

fn failed_to_use(template: &str) -> impl FnOnce(EngineError) -> OperationError {
    OperationError::engine(format!("use template `{template}`"))
}
