//! `create`: creates a sandbox from a template or a snapshot.
//!
//! The *journal* is the database of the daemon with the records of sandboxes and snapshots. An
//! *unassigned* guest has started, but has not received the identity of a sandbox (id, host name,
//! entropy, clock) yet. The `op_lock` of a sandbox serialises the operations on it.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran. The *head* of a sandbox
//! is the record in the store that decides which host of a fleet may run the sandbox. A host
//! *claims* the head before the sandbox runs (`shared.rs`).

use super::entry::SandboxEntry;
use super::resume_options::{RestoreReason, is_rewound};
use super::shared::PendingClaim;
use super::timeout::deadline_in;
use super::{OperationError, Sandboxes};
use crate::admission::Reservation;
use crate::journal::JournalChange;
use crate::lineage_record::Rollback;
use crate::operation_times::OperationTimes;
use crate::sandbox::Sandbox;
use crate::sandbox_settings::SandboxSettings;
use jiffy_api_types::{EventType, Prefetch, SandboxState};
use jiffy_engine_api::steps::{self, OperationSteps};
use jiffy_engine_api::{BootMode, Engine, SandboxSize, UnassignedGuest, new_id, new_token, now_ms};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Template or snapshot from which a sandbox starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxSource {
    /// Name of a template.
    Template(String),
    /// Id, prefix of an id, or name of a snapshot.
    Snapshot(String),
}

/// Specification of a new sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateSpec {
    /// Template or snapshot from which the sandbox starts.
    pub source: SandboxSource,
    /// Resources. Must be `None` for a snapshot, whose size is fixed.
    #[serde(default)]
    pub size: Option<SandboxSize>,
    /// Environment of all processes. If the map is empty, a snapshot's environment is used.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Settings chosen by the creator. The serialized name is the same as in records.
    #[serde(default, rename = "terms")]
    pub settings: SandboxSettings,
    /// Name, unique among the sandboxes of the owner.
    #[serde(default)]
    pub name: Option<String>,
    /// Engine. Defaults to the engine that took the snapshot, or to the default engine.
    #[serde(default)]
    pub engine: Option<String>,
    /// Memory to fetch from the store in advance.
    #[serde(default)]
    pub prefetch: Prefetch,
}

/// Description of a sandbox that is about to be registered.
pub(super) struct NewSandboxEntry {
    pub template: String,
    pub size: SandboxSize,
    pub env: BTreeMap<String, String>,
    pub settings: SandboxSettings,
    pub name: Option<String>,
    pub forked_from: Option<String>,
    pub started_from: Option<String>,
}

/// Unassigned guest for a sandbox, and how the guest was started.
pub(super) struct GuestOrigin {
    pub unassigned: Box<dyn UnassignedGuest>,
    pub mode: BootMode,
    /// Snapshot from which the guest was restored.
    pub snapshot: Option<String>,
    /// Reason for restoring the guest of an existing sandbox. `None` for a new sandbox.
    pub restore_reason: Option<RestoreReason>,
    /// Claim of a stored sandbox, which must succeed before the guest receives its identity.
    pub claim: Option<PendingClaim>,
}

impl Sandboxes {
    /// Creates a sandbox. Returns when the guest's agent has answered.
    pub async fn create(&self, spec: CreateSpec) -> Result<Sandbox, OperationError> {
        let this = self.clone();
        let work = async move {
            let result = this.create_now(spec).await;
            if let Err(e) = &result {
                // Successful creates are counted with their boot mode in `start_registered`.
                this.0.metrics.create(None, e.kind().name(), Duration::ZERO);
            }
            result
        };
        self.perform("create", "", work).await
    }

    /// Checks the specification, reserves resources, registers the sandbox, and starts its guest
    /// from the template or the snapshot.
    async fn create_now(&self, spec: CreateSpec) -> Result<Sandbox, OperationError> {
        let requested_at = Instant::now();
        let rules = spec.settings.rules("", None);
        self.0
            .engines
            .default_engine()
            .check_network(&rules)
            .map_err(OperationError::Network)?;
        let engine = self.engine_of_new(spec.engine.as_deref())?;
        match spec.source {
            SandboxSource::Template(template) => {
                Self::check_volumes(&spec.settings, engine.name())?;
                let size = match spec.size {
                    Some(size) => size,
                    None => self.default_size(&template).await?,
                };
                // Check the size before the admission, so that an invalid size is never reported as
                // a lack of resources.
                size.check()?;
                let reservation = self.admit(size)?;
                let new = NewSandboxEntry {
                    template: template.clone(),
                    size,
                    env: spec.env,
                    settings: spec.settings,
                    name: spec.name,
                    forked_from: None,
                    started_from: None,
                };
                let new = self.register(reservation, new)?;
                let identity = self.identity_of(new.record(), false);
                let templates = self.templates();
                let origin = templates.origin(engine, &template, size, &identity).await;
                self.start_registered(new, requested_at, origin).await
            }
            SandboxSource::Snapshot(_) if spec.size.is_some() => Err(OperationError::FixedSize),
            SandboxSource::Snapshot(id) => {
                let owner = spec.settings.owner.as_deref();
                let step = steps::begin("find_snapshot");
                // The pin prevents the removal of the snapshot until this function returns.
                let (snapshot, _pin) = self.snapshots().pin_or_fetch(owner, &id).await?;
                drop(step);
                // The files of a snapshot can be read only by the engine that took it.
                if spec.engine.is_some_and(|name| name != snapshot.engine) {
                    return Err(OperationError::FixedEngine {
                        snapshot: snapshot.id,
                        own: snapshot.engine,
                    });
                }
                if let Ok(engine) = self.0.engines.get(&snapshot.engine) {
                    Self::check_volumes(&spec.settings, engine.name())?;
                }
                let reservation = self.admit(snapshot.size)?;
                // An environment in the request replaces the snapshot's completely: the creator
                // decides which of the snapshot's variables the clone receives.
                let env = if spec.env.is_empty() {
                    snapshot.env.clone()
                } else {
                    spec.env
                };
                let mut settings = spec.settings;
                // Certificate authorities and proxy are inherited as a whole, like the environment.
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
                    started_from: snapshot.is_in_lineage().then(|| snapshot.id.clone()),
                };
                let new = self.register(reservation, new)?;
                // Marks the snapshot and its ancestors before the restore, which passes the marks
                // on to the fetcher, the process that downloads missing memory.
                let requested = match spec.prefetch {
                    Prefetch::All => {
                        let files = self.0.snapshot_engines.files_of(&snapshot.id);
                        files.and_then(|files| files.request_memory(&snapshot.id))
                    }
                    Prefetch::WorkingSet => Ok(()),
                };
                let identity = self.identity_of(new.record(), false);
                let origin = match requested {
                    Ok(()) => {
                        let mode = BootMode::Snapshot;
                        self.snapshots().origin(&snapshot.id, mode, &identity).await
                    }
                    // Return the error, because the entry must be removed.
                    Err(e) => Err(OperationError::engine("fetch all memory")(e)),
                };
                self.start_registered(new, requested_at, origin).await
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
        // The default engine is accepted even if it is not usable, as in a request without an
        // engine.
        let is_offered = described.is_some_and(|engine| engine.default || engine.usable);
        match engines.get(name) {
            // An engine may exist on this host but lack a requirement such as KVM.
            Ok(engine) if is_offered => Ok(engine),
            engine => Err(OperationError::NoEngine {
                name: name.to_owned(),
                exists: engine.is_ok(),
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

    /// Registers a sandbox in memory. The journal records it once it is running. A daemon that
    /// crashes before that leaves no sandbox.
    pub(super) fn register(
        &self,
        reservation: Reservation,
        new: NewSandboxEntry,
    ) -> Result<Arc<SandboxEntry>, OperationError> {
        let now = now_ms();
        let secret = |is_needed: bool| is_needed.then(new_token).transpose();
        let mut record = Sandbox {
            id: new_id()?,
            name: new.name,
            state: SandboxState::Creating,
            pause_cause: None,
            template: new.template,
            size: new.size,
            env: new.env,
            deadline_ms: None,
            agent_token: secret(new.settings.secure)?,
            traffic_token: secret(new.settings.network.restrict_traffic)?,
            settings: new.settings,
            snapshot: None,
            forked_from: new.forked_from,
            started_from: new.started_from,
            rollbacks: Vec::new(),
            boot_mode: None,
            engine: None,
            boot_ms: None,
            created_ms: now,
            changed_ms: now,
        };
        // The name is reserved before the entry exists, so that two requests cannot register the
        // same name.
        if let Some(name) = &record.name {
            // The name is released when the entry is dropped.
            self.0
                .indexes
                .names
                .claim(&record.settings.owner, name, &record.id)?;
        }
        self.claim_address(&mut record)?;
        let entry = Arc::new(SandboxEntry::new(record, self.0.indexes.clone()));
        entry.set_reservation(Some(reservation));
        // The span of a create, or of a child of a fork, was opened before the id existed.
        tracing::Span::current().record("sandbox", entry.id());
        self.0
            .entries
            .lock()
            .insert(entry.shared_id().clone(), entry.clone());
        entry.with_record(|record| self.report(EventType::SandboxCreated, record));
        Ok(entry)
    }

    /// Starts a registered sandbox. Removes the entry if the start fails.
    pub(super) async fn start_registered(
        &self,
        entry: Arc<SandboxEntry>,
        requested_at: Instant,
        origin: Result<GuestOrigin, OperationError>,
    ) -> Result<Sandbox, OperationError> {
        let _op_guard = entry.op_lock().lock().await;
        if entry.record().state != SandboxState::Creating {
            // The sandbox was killed before it had a guest. It stays killed, and the unassigned
            // guest is dropped.
            return Err(entry.refuse("start"));
        }
        let result = match origin {
            Ok(origin) => self.install(&entry, requested_at, origin).await,
            Err(e) => Err(e),
        };
        match &result {
            Ok(record) => {
                let metrics = &self.0.metrics;
                let took = requested_at.elapsed();
                metrics.create(record.boot_mode, "ok", took);
                let steps = OperationSteps::current().map(|steps| steps.list());
                let steps = steps.unwrap_or_default();
                // The times are stored here, since only this function knows the id of the new
                // sandbox.
                entry.set_create(OperationTimes::new("create", took, steps));
                self.report(EventType::SandboxReady, record);
            }
            Err(e) => {
                entry.with_record(|record| self.report_failed(record, e));
                // Dropping the entry also releases its name and its reservation.
                drop(self.0.entries.lock().remove(entry.shared_id()));
            }
        }
        result
    }

    /// Restores a guest for an existing sandbox (rollback, resume or recovery). The caller must
    /// hold `op_lock`. Releases the reservation if the restore fails and no guest was running.
    pub(super) async fn restore_existing(
        &self,
        entry: &Arc<SandboxEntry>,
        requested_at: Instant,
        snapshot: &str,
        restore_reason: RestoreReason,
    ) -> Result<Sandbox, OperationError> {
        let mode = BootMode::Snapshot;
        // Another host must not start the sandbox meanwhile. A running guest holds the claim
        // already.
        let claim = match entry.guest() {
            Some(_) => None,
            None => self.begin_claim(entry),
        };
        // The files may be in the store only.
        let owner = entry.record().settings.owner;
        let step = steps::begin("find_snapshot");
        let snapshots = self.snapshots();
        let pinned = snapshots.pin_or_fetch(owner.as_deref(), snapshot).await;
        drop(step);
        let result = match pinned {
            Ok(_pin) => {
                let start = async {
                    let before = entry.record();
                    let rewound = is_rewound(&before, Some(&restore_reason));
                    let identity = self.identity_of(before, rewound);
                    let snapshots = self.snapshots();
                    let origin = snapshots.origin(snapshot, mode, &identity).await?;
                    let origin = GuestOrigin {
                        restore_reason: Some(restore_reason),
                        claim,
                        ..origin
                    };
                    self.install(entry, requested_at, origin).await
                };
                // The future is boxed, because it is large.
                let start = Box::pin(start);
                // Limits concurrent starts and shares the processors fairly among owners.
                self.0.start_pacer.pace(owner.as_deref(), start).await
            }
            // The files may be missing because another host has taken over the sandbox.
            Err(e) => Err(match claim {
                Some(claim) => claim.moved().await.unwrap_or(e),
                None => e,
            }),
        };
        // A running guest keeps its reservation, because a failed rollback leaves it running.
        if result.is_err() && entry.guest().is_none() {
            entry.set_reservation(None);
        }
        // Another host has taken over the sandbox or killed it. `is_adopted` is true for a sandbox
        // that another host stored; `end_adoption` below removes it.
        if let Err(OperationError::Head(e)) = &result
            && e.is_moved()
            && !entry.is_adopted()
        {
            self.forget_moved(entry);
        }
        self.end_adoption(entry, &result);
        result
    }

    /// Assigns the identity of the sandbox to a guest, replaces the previous guest by it, and stops
    /// the previous guest. The caller must hold `op_lock`.
    ///
    /// The engine detaches the guest before the journal records it, so that a daemon that starts
    /// after a crash can adopt each recorded guest. If the journal fails, the new guest is stopped
    /// and the previous guest keeps running.
    pub(super) async fn install(
        &self,
        entry: &Arc<SandboxEntry>,
        requested_at: Instant,
        origin: GuestOrigin,
    ) -> Result<Sandbox, OperationError> {
        let before = entry.record();
        let rewound = is_rewound(&before, origin.restore_reason.as_ref());
        let sandbox_identity = self.identity_of(before, rewound);
        let id = &sandbox_identity.id;
        let failed = || OperationError::engine(format!("start sandbox {id}"));
        let continues = self.continues_sandbox(&origin);
        let claim = match origin.claim {
            Some(pending) => pending.wait().await?,
            None => None,
        };
        let startup = origin.unassigned.boot_startup();
        // A guest of a snapshot without memory boots.
        let mode = startup.as_ref().map_or(origin.mode, |_| BootMode::Cold);
        let guest = origin.unassigned.assign_identity(&sandbox_identity).await;
        let guest = self.with_volumes(entry, guest.map_err(failed())?).await?;
        // Only a cold boot needs the start command: a snapshot contains its processes.
        if mode == BootMode::Cold {
            let booted = entry.record();
            let started = self.templates().start_booted(&booted, startup, &guest);
            if let Err(e) = started.await {
                guest.stop().await;
                return Err(e);
            }
        }
        // Metrics contain this name of the step in which the guest is detached.
        let mut step = steps::begin("keep");
        let handle = match guest.detach().await {
            Ok(handle) => handle,
            Err(e) => {
                guest.stop().await;
                return Err(failed()(e));
            }
        };
        let before = entry.record();
        let mut settings = before.settings;
        if let Some(RestoreReason::Resume(options)) = origin.restore_reason {
            options.apply(&mut settings);
        }
        // The timeout starts when the sandbox can be used. A rollback of a running sandbox does not
        // change the deadline.
        let deadline = match before.state {
            SandboxState::Running => before.deadline_ms,
            _ => settings
                .timeout_s
                .map(|s| deadline_in(Duration::from_secs(s))),
        };
        let mut rollbacks = before.rollbacks;
        if let Some(RestoreReason::Rollback) = origin.restore_reason {
            Rollback::add(&mut rollbacks, origin.snapshot.as_deref());
        }
        let record = Sandbox {
            settings,
            rollbacks,
            snapshot: origin.snapshot,
            boot_mode: Some(mode),
            engine: Some(guest.engine().to_owned()),
            boot_ms: Some(requested_at.elapsed().as_secs_f64() * 1000.0),
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
        // The journal contains the guest: dropping the claim now would release the sandbox to other
        // hosts.
        if let Some((claim, revision)) = claim {
            claim.retain();
            self.set_head(entry, revision, None);
        }
        // Set the guest before the record, so that a reader that sees a running sandbox also finds
        // its guest.
        let before = entry.replace_guest(Some(guest.clone()));
        entry.set_record(record.clone());
        self.watch(entry, &guest);
        let took = requested_at.elapsed();
        self.0.metrics.boot(mode, took.as_secs_f64() * 1000.0);
        // The new deadline may be earlier than the deadline for which the timeout task waits.
        self.0.deadlines.notify();
        // Stop the previous guest last, so that the sandbox still has it after an error above.
        if let Some(before) = before {
            let _step = steps::begin("stop");
            before.stop().await;
        }
        if continues {
            self.run_resume_hooks(&record, &guest).await;
        }
        Ok(record)
    }
}
