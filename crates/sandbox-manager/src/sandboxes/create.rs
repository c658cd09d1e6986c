//! `create`: a new sandbox from a template or a snapshot.

use super::entry::SandboxEntry;
use super::timeout::deadline_in;
use super::wake_options::ReviveReason;
use super::{OperationError, Sandboxes};
use crate::admission::Reservation;
use crate::journal::JournalChange;
use crate::operation_times::OperationTimes;
use crate::sandbox::Sandbox;
use crate::sandbox_settings::SandboxSettings;
use crate::site;
use jiffy_api_types::{Prefetch, SandboxState};
use jiffy_engine_api::steps::{self, OperationSteps};
use jiffy_engine_api::{
    BootMode, Engine, SandboxIdentity, SandboxSize, UnassignedGuest, new_id, new_token, now_ms,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Template or snapshot that a sandbox starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxSource {
    /// A template by name.
    Template(String),
    /// A snapshot by id, the beginning of it, or name.
    Snapshot(String),
}

/// Specification of a new sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateSpec {
    /// Template or snapshot that it starts from.
    pub source: SandboxSource,
    /// Resources; a snapshot decides for itself.
    #[serde(default)]
    pub size: Option<SandboxSize>,
    /// Environment of every process in it; none at all: a snapshot's.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Settings that its creator chose.
    #[serde(default, rename = "terms")]
    pub settings: SandboxSettings,
    /// Name that it is called by, unique among its owner's.
    #[serde(default)]
    pub name: Option<String>,
    /// Engine that isolates it; none: the default, or the one that took the snapshot.
    #[serde(default)]
    pub engine: Option<String>,
    /// Memory that is fetched if the snapshot is in the store.
    #[serde(default)]
    pub prefetch: Prefetch,
}

/// A sandbox that is to be entered.
pub(super) struct NewSandboxEntry {
    pub template: String,
    pub size: SandboxSize,
    pub env: BTreeMap<String, String>,
    pub settings: SandboxSettings,
    pub name: Option<String>,
    pub forked_from: Option<String>,
}

/// Origin of a new guest.
pub(super) struct GuestOrigin {
    pub unassigned: Box<dyn UnassignedGuest>,
    pub mode: BootMode,
    /// Snapshot it was restored from.
    pub snapshot: Option<String>,
    /// Reason for restoring a sandbox that exists; none: it is new.
    pub revive_reason: Option<ReviveReason>,
}

impl Sandboxes {
    /// Makes a sandbox and returns when its agent has answered.
    pub async fn create(&self, spec: CreateSpec) -> Result<Sandbox, OperationError> {
        let this = self.clone();
        let work = async move {
            let result = this.create_now(spec).await;
            if let Err(e) = &result {
                this.0.metrics.create(None, e.kind().name(), Duration::ZERO);
            }
            result
        };
        self.perform("create", "", work).await
    }

    async fn create_now(&self, spec: CreateSpec) -> Result<Sandbox, OperationError> {
        let asked = Instant::now();
        let rules = spec.settings.rules();
        self.0
            .engines
            .default_engine()
            .check_network(&rules)
            .map_err(OperationError::Network)?;
        let engine = self.engine_of_new(spec.engine.as_deref())?;
        match spec.source {
            SandboxSource::Template(template) => {
                let size = match spec.size {
                    Some(size) => size,
                    None => self.default_size(&template).await?,
                };
                size.check()?;
                let reservation = self.admit(size)?;
                let new = NewSandboxEntry {
                    template: template.clone(),
                    size,
                    env: spec.env,
                    settings: spec.settings,
                    name: spec.name,
                    forked_from: None,
                };
                let new = self.enter(reservation, new)?;
                let identity = self.identity_of(new.record(), false);
                let templates = self.templates();
                let origin = templates.origin(engine, &template, size, &identity);
                let origin = origin.await;
                self.bring_up(new, asked, origin).await
            }
            SandboxSource::Snapshot(_) if spec.size.is_some() => Err(OperationError::FixedSize),
            SandboxSource::Snapshot(id) => {
                let owner = spec.settings.owner.as_deref();
                let step = steps::begin("find_snapshot");
                let (snapshot, _pin) = self.snapshots().pin_or_fetch(owner, &id).await?;
                drop(step);
                if spec.engine.is_some_and(|wanted| wanted != snapshot.engine) {
                    return Err(OperationError::FixedEngine {
                        snapshot: snapshot.id,
                        own: snapshot.engine,
                    });
                }
                let reservation = self.admit(snapshot.size)?;
                // As a whole: whoever gives one decides what of their own the clone is told.
                let env = match spec.env.is_empty() {
                    true => snapshot.env.clone(),
                    false => spec.env,
                };
                let mut settings = spec.settings;
                if settings.site.is_empty() {
                    settings.site = snapshot.site.clone();
                }
                let new = NewSandboxEntry {
                    template: snapshot.template.clone(),
                    size: snapshot.size,
                    env,
                    settings,
                    name: spec.name,
                    forked_from: None,
                };
                let new = self.enter(reservation, new)?;
                if spec.prefetch == Prefetch::All {
                    let files = self.0.snapshot_engines.files_of(&snapshot.id);
                    let requested = files.and_then(|files| files.request_memory(&snapshot.id));
                    requested.map_err(OperationError::engine("fetch all memory"))?;
                }
                let identity = self.identity_of(new.record(), false);
                let mode = BootMode::Snapshot;
                let origin = self.snapshots().origin(&snapshot.id, mode, &identity).await;
                self.bring_up(new, asked, origin).await
            }
        }
    }

    /// Returns the engine of a new sandbox: the default, or the engine `name`.
    ///
    /// # Errors
    /// Fails if the engine `name` creates no sandboxes on this host.
    fn engine_of_new(&self, name: Option<&str>) -> Result<&Arc<dyn Engine>, OperationError> {
        let engines = &self.0.engines;
        let Some(name) = name else {
            return Ok(engines.default_engine());
        };
        let all = engines.descriptions();
        let described = all.iter().find(|engine| engine.name == name);
        let is_offered = described.is_some_and(|engine| engine.default || engine.usable);
        match engines.get(name) {
            Ok(engine) if is_offered => Ok(engine),
            found => Err(OperationError::NoEngine {
                wanted: name.to_owned(),
                known: found.is_ok(),
                usable: all
                    .into_iter()
                    .filter(|e| e.usable)
                    .map(|e| e.name)
                    .collect(),
            }),
        }
    }

    async fn default_size(&self, template: &str) -> Result<SandboxSize, OperationError> {
        let size = self.0.engines.default_engine().default_size(template).await;
        size.map_err(OperationError::engine(format!("use template `{template}`")))
    }

    /// Enters a sandbox that is being made. The journal hears of it when it is up: until then there
    /// is none.
    pub(super) fn enter(
        &self,
        reservation: Reservation,
        new: NewSandboxEntry,
    ) -> Result<Arc<SandboxEntry>, OperationError> {
        let now = now_ms();
        let secret = |wanted: bool| wanted.then(new_token).transpose();
        let record = Sandbox {
            id: new_id()?,
            name: new.name,
            state: SandboxState::Creating,
            template: new.template,
            size: new.size,
            env: new.env,
            deadline_ms: None,
            agent_token: secret(new.settings.secure)?,
            traffic_token: secret(new.settings.network.restrict_traffic)?,
            settings: new.settings,
            snapshot: None,
            forked_from: new.forked_from,
            boot_mode: None,
            engine: None,
            boot_ms: None,
            created_ms: now,
            changed_ms: now,
        };
        if let Some(name) = &record.name {
            // It goes with the entry.
            self.0
                .indexes
                .names
                .claim(&record.settings.owner, name, &record.id)?;
        }
        let entry = Arc::new(SandboxEntry::new(record, self.0.indexes.clone()));
        entry.set_reservation(Some(reservation));
        // Of a create only; the others know whom they are about.
        tracing::Span::current().record("sandbox", entry.id());
        self.0
            .entries
            .lock()
            .insert(entry.shared_id().clone(), entry.clone());
        Ok(entry)
    }

    /// Makes a sandbox that was entered into one that runs, or into none.
    pub(super) async fn bring_up(
        &self,
        entry: Arc<SandboxEntry>,
        asked: Instant,
        origin: Result<GuestOrigin, OperationError>,
    ) -> Result<Sandbox, OperationError> {
        let _op_guard = entry.op_lock().lock().await;
        if entry.record().state != SandboxState::Creating {
            // Killed before there was a guest: it stays killed, and its origin goes.
            return Err(entry.refuse("bring up"));
        }
        let result = match origin {
            Ok(origin) => self.install(&entry, asked, origin).await,
            Err(e) => Err(e),
        };
        match &result {
            Ok(record) => {
                let metrics = &self.0.metrics;
                let took = asked.elapsed();
                metrics.create(record.boot_mode, "ok", took);
                let steps = OperationSteps::current().map(|steps| steps.list());
                let steps = steps.unwrap_or_default();
                entry.set_create(OperationTimes::new("create", took, steps));
            }
            Err(_) => drop(self.0.entries.lock().remove(entry.shared_id())),
        }
        result
    }

    /// Gives a sandbox that there is a guest from a snapshot, to which it is put back, in which it
    /// slept, or from which it starts again because its guest was lost; if that fails and it had
    /// none before, it needs no place. Needs the turn.
    pub(super) async fn revive(
        &self,
        entry: &Arc<SandboxEntry>,
        asked: Instant,
        snapshot: &str,
        revive_reason: ReviveReason,
    ) -> Result<Sandbox, OperationError> {
        let mode = BootMode::Snapshot;
        // Its files may be gone from here, and the store have them.
        let owner = entry.record().settings.owner;
        let step = steps::begin("find_snapshot");
        let here = self.snapshots().pin_or_fetch(owner.as_deref(), snapshot);
        let here = here.await;
        drop(step);
        let result = match here {
            Ok(_pin) => {
                let start = async {
                    let before = entry.record();
                    let rewound = is_rewound(&before, Some(&revive_reason));
                    let identity = self.identity_of(before, rewound);
                    let snapshots = self.snapshots();
                    let origin = snapshots.origin(snapshot, mode, &identity).await?;
                    let origin = GuestOrigin {
                        revive_reason: Some(revive_reason),
                        ..origin
                    };
                    self.install(entry, asked, origin).await
                };
                // Boxed: it is deep.
                let start = Box::pin(start);
                self.0.start_pacer.pace(owner.as_deref(), start).await
            }
            Err(e) => Err(e),
        };
        if result.is_err() && entry.guest().is_none() {
            entry.set_reservation(None);
        }
        result
    }

    /// Identity of a sandbox.
    pub(super) fn identity_of(&self, record: Sandbox, rewound: bool) -> SandboxIdentity {
        // Templates of a key are stored under its name, which the key does not use.
        let owner = record.settings.owner.as_deref();
        let own = owner.and_then(|key| record.template.strip_prefix(key)?.strip_prefix('/'));
        let template = own.unwrap_or(&record.template).to_owned();
        SandboxIdentity {
            id: record.id,
            template: Some(template),
            env: record.env,
            access_token: record.agent_token,
            rewound,
            network: record.settings.rules(),
            site: site::joined(&self.0.site, &record.settings.site),
        }
    }

    /// Welcomes an unassigned guest as the sandbox and puts it in the place of the guest there was,
    /// which ends. Needs the turn.
    pub(super) async fn install(
        &self,
        entry: &Arc<SandboxEntry>,
        asked: Instant,
        origin: GuestOrigin,
    ) -> Result<Sandbox, OperationError> {
        let before = entry.record();
        let rewound = is_rewound(&before, origin.revive_reason.as_ref());
        let sandbox_identity = self.identity_of(before, rewound);
        let id = &sandbox_identity.id;
        let guest = origin.unassigned.assign_identity(&sandbox_identity).await;
        let guest = guest.map_err(OperationError::engine(format!("bring up sandbox {id}")))?;
        if origin.mode == BootMode::Cold {
            let started = self
                .templates()
                .start_up(&entry.record().template, &guest)
                .await;
            if let Err(e) = started {
                guest.stop().await;
                return Err(e);
            }
        }
        let mut step = steps::begin("keep");
        let handle = match guest.detach().await {
            Ok(handle) => handle,
            Err(e) => {
                guest.stop().await;
                return Err(OperationError::engine(format!("bring up sandbox {id}"))(e));
            }
        };
        let before = entry.record();
        let mut settings = before.settings;
        if let Some(ReviveReason::Wake(options)) = origin.revive_reason {
            options.apply(&mut settings);
        }
        // Time runs from the moment there is something to use. A rollback changes nothing about it.
        let deadline = match before.state {
            SandboxState::Running => before.deadline_ms,
            _ => settings
                .timeout_s
                .map(|s| deadline_in(Duration::from_secs(s))),
        };
        let record = Sandbox {
            settings,
            snapshot: origin.snapshot,
            boot_mode: Some(origin.mode),
            engine: Some(guest.engine().to_owned()),
            boot_ms: Some(asked.elapsed().as_secs_f64() * 1000.0),
            deadline_ms: deadline,
            ..entry.record_in(SandboxState::Running)
        };
        let changes = [
            JournalChange::Sandbox(record.clone()),
            JournalChange::Guest(record.id.clone(), handle),
        ];
        step.next("journal");
        if let Err(e) = self.0.journal.commit(&changes) {
            guest.stop().await;
            return Err(e.into());
        }
        drop(step);
        let before = entry.replace_guest(Some(guest.clone()));
        entry.set_record(record.clone());
        self.watch(entry, &guest);
        let took = asked.elapsed();
        self.0
            .metrics
            .boot(origin.mode, took.as_secs_f64() * 1000.0);
        self.0.deadlines.notify();
        if let Some(before) = before {
            let _step = steps::begin("stop");
            before.stop().await;
        }
        Ok(record)
    }
}

/// True if a guest that is restored has run on from its snapshot once already: it was put back to
/// it, or lost.
fn is_rewound(before: &Sandbox, revive_reason: Option<&ReviveReason>) -> bool {
    matches!(revive_reason, Some(ReviveReason::Rollback))
        || matches!(before.state, SandboxState::Broken { .. })
}
