//! `snapshot` and `capture`: store the state of a running sandbox at one instant.
//!
//! The `op_lock` of a sandbox serialises the operations on it. The *journal* is the database of the
//! daemon with the records of sandboxes and snapshots. An *intent* is the journal's record of a
//! snapshot that is not complete. A *retraction* is the removal of a copy from a store.
//!
//! A *draft* is a snapshot that its engine has not published yet. A *pin* protects a snapshot from
//! garbage collection. A *fold* merges the files of a removed snapshot into the files of its child.
//! A *captured* snapshot is acknowledged to its client, but its files are not complete yet.

use crate::journal::JournalChange;
use crate::quota::{DiskLimit, QuotaAmount, QuotaPermit, QuotaRequest};
use crate::sandbox::{Sandbox, SandboxOperation};
use crate::sandboxes::entry::SandboxEntry;
use crate::sandboxes::guest_hooks::HookMoment;
use crate::sandboxes::snapshots::capture::Acknowledgement;
use crate::sandboxes::{OperationError, Sandboxes, Snapshots};
use crate::snapshot::Snapshot;
use futures_util::future::OptionFuture;
use jiffy_api_types::{EventType, SandboxState, SnapshotContent, SnapshotPurpose};
use jiffy_engine_api::{
    AfterSnapshot, EngineError, Guest, SnapshotRequest, SnapshotTimes, new_id, now_ms, steps,
};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Purpose, content and name of a new snapshot.
#[derive(Debug, Clone)]
pub(in crate::sandboxes) struct SnapshotKind {
    pub purpose: SnapshotPurpose,
    pub content: SnapshotContent,
    pub name: Option<String>,
}

impl SnapshotKind {
    /// Returns a snapshot of memory and disk without a name.
    pub fn full(purpose: SnapshotPurpose) -> Self {
        Self {
            purpose,
            content: SnapshotContent::Full,
            name: None,
        }
    }
}

impl Sandboxes {
    /// Takes a snapshot of memory and disk of a sandbox, which continues to run. For a paused
    /// sandbox, returns the snapshot of its pause.
    pub async fn snapshot(
        &self,
        id: &str,
        name: Option<String>,
    ) -> Result<Snapshot, OperationError> {
        self.snapshot_with(id, name, SnapshotContent::Full).await
    }

    /// Like [`Self::snapshot`], with this content.
    ///
    /// # Errors
    /// Also fails if the disk only is requested of a sandbox that is paused with its memory.
    pub async fn snapshot_with(
        &self,
        id: &str,
        name: Option<String>,
        content: SnapshotContent,
    ) -> Result<Snapshot, OperationError> {
        self.take_snapshot(id, name, content, None).await
    }

    /// Like [`Self::snapshot`], but returns once the memory is frozen if the engine supports this.
    /// The snapshot is stored in the background. It is lost if the process that holds its memory,
    /// or the host, fails before it is stored.
    pub async fn capture(
        &self,
        id: &str,
        name: Option<String>,
    ) -> Result<Snapshot, OperationError> {
        let (acknowledgement, captured) = oneshot::channel();
        tokio::select! {
            // The complete snapshot has precedence if both are ready.
            biased;
            taken = self.take_snapshot(id, name, SnapshotContent::Full, Some(acknowledgement)) => taken,
            // The snapshot continues in its own task and is completed.
            Ok(captured) = captured => Ok(captured),
        }
    }

    /// Takes a snapshot that a client requests, and records its event.
    async fn take_snapshot(
        &self,
        id: &str,
        name: Option<String>,
        content: SnapshotContent,
        acknowledgement: Option<Acknowledgement>,
    ) -> Result<Snapshot, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("snapshot", &entry.id(), async move {
            let _op_guard = entry.op_lock().lock().await;
            let kind = SnapshotKind {
                purpose: SnapshotPurpose::Requested,
                content,
                name,
            };
            let taken = this.snapshot_for(&entry, kind, "snapshot", acknowledgement);
            let taken = taken.await?;
            let report = |record: &Sandbox| {
                this.report_with(EventType::SandboxSnapshotTaken, record, |event| {
                    event.snapshot = Some(taken.id.clone());
                    event.name.clone_from(&taken.name);
                });
            };
            entry.with_record(report);
            Ok(taken)
        })
        .await
    }

    /// Takes a snapshot of a running sandbox, or returns the snapshot of a paused sandbox. The
    /// caller must hold `op_lock`.
    pub(in crate::sandboxes) async fn snapshot_for(
        &self,
        entry: &SandboxEntry,
        kind: SnapshotKind,
        verb: &'static str,
        acknowledgement: Option<Acknowledgement>,
    ) -> Result<Snapshot, OperationError> {
        let operation = match kind.purpose {
            SnapshotPurpose::Fork => SandboxOperation::Fork,
            _ => SandboxOperation::Snapshot,
        };
        let sandbox = entry.allow(operation, verb)?;
        if sandbox.state == SandboxState::Paused {
            return self.snapshot_of_paused(&sandbox, kind).await;
        }
        let guest = entry.running(operation, verb)?;
        let moment = HookMoment::BeforePause;
        let has_hooks = self.run_hooks(&sandbox, &guest, moment).await;
        let taken = self
            .snapshot_guest(entry, sandbox, &guest, kind, acknowledgement)
            .await;
        if has_hooks {
            self.run_resume_hooks(&entry.record(), &guest).await;
        }
        taken
    }

    /// Stores the state of `guest`, which continues to run. The caller must hold `op_lock`.
    async fn snapshot_guest(
        &self,
        entry: &SandboxEntry,
        sandbox: Sandbox,
        guest: &Arc<dyn Guest>,
        kind: SnapshotKind,
        acknowledgement: Option<Acknowledgement>,
    ) -> Result<Snapshot, OperationError> {
        let record = self.snapshots().draft(&sandbox, &**guest, kind)?;
        let permit = self.budgets().reserve_snapshot(&record, &sandbox).await?;
        // The pin protects the snapshot until the sandbox's record references it.
        let _pin = self.0.catalog.pin(&record.id);
        let snapshot = self
            .snapshots()
            .take_acknowledged(
                &**guest,
                record,
                AfterSnapshot::Resume,
                &permit,
                acknowledgement,
                |snapshot| {
                    vec![JournalChange::Sandbox(record_after_snapshot(
                        entry, snapshot,
                    ))]
                },
            )
            .await?;
        // Later snapshots store only the changes since this one.
        entry.set_record(record_after_snapshot(entry, &snapshot));
        // The sandbox no longer needs its former snapshot.
        self.0.gc.collect(sandbox.snapshot);
        Ok(snapshot)
    }

    /// Returns the snapshot of a paused sandbox. If a client requests it, it becomes a requested
    /// snapshot with this name.
    async fn snapshot_of_paused(
        &self,
        sandbox: &Sandbox,
        kind: SnapshotKind,
    ) -> Result<Snapshot, OperationError> {
        let SnapshotKind {
            purpose,
            content,
            name,
        } = kind;
        let id = sandbox.snapshot.as_deref().unwrap_or_default();
        let owner = sandbox.settings.owner.as_deref();
        let (mut snapshot, _pin) = self.snapshots().pin_or_fetch(owner, id).await?;
        // The disk of the pause is consistent only together with the memory.
        if snapshot.content.is_full() && !content.is_full() {
            return Err(OperationError::PausedWithMemory {
                id: sandbox.id.clone(),
            });
        }
        // A fork uses the snapshot of the pause without a change.
        if purpose == SnapshotPurpose::Requested {
            // A snapshot that a client requested before is already counted.
            let amount = QuotaAmount {
                snapshots: u64::from(!snapshot.is_requested()),
                ..QuotaAmount::default()
            };
            let request = QuotaRequest {
                amount,
                disk_floor: None,
            };
            let _permit = self
                .budgets()
                .reserve(snapshot.owner.as_deref(), request)
                .await?;
            let change = self.0.catalog.change();
            // A fold may have changed the parent before the change began.
            if let Some(current) = self.0.catalog.get(&snapshot.id) {
                snapshot = current;
            }
            let before = snapshot.clone();
            snapshot.name = name.or(snapshot.name);
            snapshot.purpose = SnapshotPurpose::Requested;
            snapshot.retained = true;
            // A copy in a store must have the same record as this host, so an outdated copy is
            // removed.
            let copies = if snapshot == before {
                Vec::new()
            } else {
                snapshot.store.discard_copies(&before.id)
            };
            let retractions = copies.iter().cloned().map(JournalChange::Retraction);
            // The snapshot and the retractions are one transaction: without the retractions,
            // outdated copies would stay in the store.
            change.commit(snapshot.clone(), retractions.collect())?;
            drop(change);
            self.0.upkeep.enqueue_checksums(&snapshot.id);
            self.0.uploads.retract(copies);
            self.snapshots().upload(&snapshot);
        }
        Ok(snapshot)
    }
}

impl Snapshots<'_> {
    /// Returns the record of a new snapshot of `sandbox`, whose guest is `guest`.
    pub(in crate::sandboxes) fn draft(
        self,
        sandbox: &Sandbox,
        guest: &dyn Guest,
        kind: SnapshotKind,
    ) -> Result<Snapshot, OperationError> {
        let SnapshotKind {
            purpose,
            content,
            name,
        } = kind;
        Ok(Snapshot {
            id: new_id()?,
            name,
            purpose,
            sandbox: sandbox.id.clone(),
            owner: sandbox.settings.owner.clone(),
            env: sandbox.env.clone(),
            site: sandbox.settings.site.clone(),
            template: sandbox.template.clone(),
            fingerprint: String::new(),
            size: sandbox.size,
            engine: guest.engine().to_owned(),
            parent: sandbox.snapshot.clone(),
            pruned: None,
            // Other snapshots exist as long as a sandbox or snapshot needs them.
            retained: purpose == SnapshotPurpose::Requested,
            stopped_ms: 0.0,
            total_ms: 0.0,
            bytes: 0,
            created_ms: now_ms(),
            content,
            storing: false,
            store: Default::default(),
        })
    }

    /// Makes the engine write `draft` with at most the bytes of `permit`. The changes that `with`
    /// returns are committed together with the completed snapshot.
    pub(in crate::sandboxes) async fn take(
        self,
        guest: &dyn Guest,
        draft: Snapshot,
        then: AfterSnapshot,
        permit: &QuotaPermit,
        with: impl FnOnce(&Snapshot) -> Vec<JournalChange>,
    ) -> Result<Snapshot, OperationError> {
        self.take_acknowledged(guest, draft, then, permit, None, with)
            .await
    }

    /// Like [`Self::take`]. Sends `acknowledgement` once the memory is captured, if the engine
    /// supports this.
    ///
    /// The journal contains the intent before the engine writes the first byte. After a crash, the
    /// recovery thus decides by the files whether the snapshot is complete.
    pub(in crate::sandboxes) async fn take_acknowledged(
        self,
        guest: &dyn Guest,
        draft: Snapshot,
        then: AfterSnapshot,
        permit: &QuotaPermit,
        acknowledgement: Option<Acknowledgement>,
        with: impl FnOnce(&Snapshot) -> Vec<JournalChange>,
    ) -> Result<Snapshot, OperationError> {
        // The pin protects the files until the snapshot has its record.
        let _pin = self.0.catalog.pin(&draft.id);
        let mut step = steps::begin("journal");
        self.0
            .journal
            .commit(&[JournalChange::Intent(draft.clone())])?;
        step.next("snapshot");
        let (notice, acknowledging) = acknowledgement
            .map(|acknowledgement| {
                let (notice, frozen) = oneshot::channel();
                (notice, self.acknowledge(&draft, frozen, acknowledgement))
            })
            .unzip();
        let taking = guest.take_snapshot(SnapshotRequest {
            id: &draft.id,
            parent: draft.parent.as_deref(),
            content: draft.content,
            then,
            max_bytes: permit.disk_bytes(),
            notice,
        });
        let acknowledging = OptionFuture::from(acknowledging);
        // Both futures run concurrently, since the engine sends the notice while it is still
        // writing the snapshot.
        let (result, storing) = tokio::join!(taking, acknowledging);
        drop(step);
        // Tasks that wait for the snapshot continue when `storing` is dropped at the end of this
        // function.
        let storing = storing.flatten();
        let failure = match result {
            Ok(times) => return Ok(self.complete(guest, draft, times, with)),
            Err(EngineError::SnapshotTooLarge { needed, most: left }) => {
                match permit.disk_limit() {
                    DiskLimit::Key => OperationError::DiskQuota { needed, left },
                    DiskLimit::Host => OperationError::HostDisk { needed, left },
                }
            }
            Err(e) => {
                // A snapshot of a template has no sandbox.
                let what = match draft.sandbox.as_str() {
                    "" => format!("snapshot template `{}`", draft.template),
                    sandbox => format!("snapshot sandbox {sandbox}"),
                };
                OperationError::engine(what)(e)
            }
        };
        // An acknowledged snapshot has a record, which must be removed, and clients learn the
        // reason.
        match storing {
            Some(_) => self.lose(&draft, &failure.to_string()),
            None => {
                let removal = JournalChange::NoSnapshot(draft.id.clone());
                self.0.journal.commit_write_behind(&[removal]);
            }
        }
        Err(failure)
    }

    /// Registers `draft`, which the engine has written, and commits it together with `with`.
    pub(in crate::sandboxes) fn complete(
        self,
        guest: &dyn Guest,
        draft: Snapshot,
        times: SnapshotTimes,
        with: impl FnOnce(&Snapshot) -> Vec<JournalChange>,
    ) -> Snapshot {
        let mut snapshot = Snapshot {
            storing: false,
            stopped_ms: times.stopped_us as f64 / 1000.0,
            total_ms: times.total_us as f64 / 1000.0,
            engine: guest.engine().to_owned(),
            ..draft
        };
        let files = self.0.engines.snapshot_files(&snapshot.engine);
        let size = files.ok().and_then(|files| files.size(&snapshot.id));
        // An unknown size is corrected by the next start of the daemon.
        snapshot.bytes = size.unwrap_or(0);
        let more = with(&snapshot);
        let _step = steps::begin("journal");
        let change = self.0.catalog.change();
        // The files are complete, so the snapshot can no longer be rejected.
        change.commit_write_behind(snapshot.clone(), more);
        drop(change);
        if snapshot.retained {
            self.0.upkeep.enqueue_checksums(&snapshot.id);
        }
        self.upload(&snapshot);
        snapshot
    }
}

/// Returns the record of the sandbox after `snapshot`. A sandbox that is being killed gets the
/// state `Killed`, so that the journal never contains it as running again.
pub(in crate::sandboxes) fn record_after_snapshot(
    entry: &SandboxEntry,
    snapshot: &Snapshot,
) -> Sandbox {
    let record = if entry.is_ending() {
        entry.record_in(SandboxState::Killed)
    } else {
        entry.record()
    };
    Sandbox {
        snapshot: Some(snapshot.id.clone()),
        ..record
    }
}
