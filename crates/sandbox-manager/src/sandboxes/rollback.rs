//! `rollback`: returns a sandbox to a snapshot.
//!
//! The *journal* is the database of the daemon with the records of sandboxes and snapshots.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. A daemon *adopts*
//! the guests that continued to run while no daemon ran.

use super::entry::SandboxEntry;
use super::resume_options::RestoreReason;
use super::{OperationError, Sandboxes};
use crate::journal::JournalChange;
use crate::lineage_record::Rollback;
use crate::sandbox::{Sandbox, SandboxOperation};
use crate::snapshot::Snapshot;
use jiffy_api_types::{EventType, SandboxState};
use jiffy_engine_api::{BootMode, Guest, RollbackFailure, steps};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

impl Sandboxes {
    /// Rolls a sandbox back to a snapshot with the same template and size. The id does not change.
    /// If possible, the guest is rolled back in place. Otherwise the present guest runs until a
    /// restored guest has answered, and is then stopped.
    pub async fn rollback(&self, id: &str, snapshot: &str) -> Result<Sandbox, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        let owner = entry.record().settings.owner;
        let snapshots = self.snapshots();
        let (snapshot, pin) = snapshots.pin_or_fetch(owner.as_deref(), snapshot).await?;
        self.perform("rollback", &entry.id(), async move {
            let _pin = pin;
            let _op_guard = entry.op_lock().lock().await;
            let requested_at = Instant::now();
            let record = entry.allow(SandboxOperation::Rollback, "roll back")?;
            if record.state != SandboxState::Running {
                this.expect_no_hold(&entry)?;
            }
            if (&snapshot.template, snapshot.size) != (&record.template, record.size) {
                return Err(OperationError::IncompatibleSnapshot {
                    id: record.id,
                    snapshot: snapshot.id,
                    ours: describe(&record.template, record.size),
                    theirs: describe(&snapshot.template, snapshot.size),
                });
            }
            let previous = record.snapshot.clone();
            let in_place = this.roll_back_in_place(&entry, requested_at, &snapshot);
            let record = match in_place.await? {
                Some(record) => record,
                None => {
                    this.install_restored(&entry, requested_at, &snapshot.id)
                        .await?
                }
            };
            this.report(EventType::SandboxRolledBack, &record);
            // The sandbox no longer needs the snapshot that it descended from before.
            this.0.gc.collect(previous);
            Ok(record)
        })
        .await
    }

    /// Replaces the guest of the sandbox, if it has one, by a restored guest.
    async fn install_restored(
        &self,
        entry: &Arc<SandboxEntry>,
        requested_at: Instant,
        snapshot: &str,
    ) -> Result<Sandbox, OperationError> {
        let record = entry.record();
        // A running sandbox keeps its reservation, even if the host has no resources left to
        // reserve.
        if entry.has_reservation() {
            self.0.admission.check_replacement()?;
        } else {
            entry.set_reservation(Some(self.admit(record.size)?));
        }
        let reason = RestoreReason::Rollback;
        self.restore_existing(entry, requested_at, snapshot, reason)
            .await
    }

    /// Rolls back the guest of a running sandbox in place. Returns `None`, with the guest
    /// unchanged, if the sandbox is not running, if the snapshot is of another engine, or if the
    /// engine rejects the rollback. A guest that is lost during the rollback is replaced by a
    /// restored guest.
    async fn roll_back_in_place(
        &self,
        entry: &Arc<SandboxEntry>,
        requested_at: Instant,
        snapshot: &Snapshot,
    ) -> Result<Option<Sandbox>, OperationError> {
        let before = entry.record();
        let (SandboxState::Running, Some(guest)) = (&before.state, entry.guest()) else {
            return Ok(None);
        };
        // Only the engine that has the files of the snapshot can restore it.
        if snapshot.engine != guest.engine() {
            return Ok(None);
        }
        let snapshot = &*snapshot.id;
        // Like a restore, a rollback opens the files of each ancestor, so a long lineage is merged
        // first.
        self.snapshots().shorten_lineage(snapshot).await?;
        // `rewound` is true: a guest may already have run from the state of the snapshot.
        let identity = self.identity_of(before.clone(), true);
        // While the rollback is in progress, the journal records the sandbox as paused in the
        // snapshot. A daemon that starts after a crash then does not adopt the guest. Its memory
        // may be a mix of both states, and it has no defined parent snapshot.
        let mut rollbacks = before.rollbacks.clone();
        Rollback::add(&mut rollbacks, Some(snapshot));
        let paused = Sandbox {
            snapshot: Some(snapshot.to_owned()),
            rollbacks: rollbacks.clone(),
            ..entry.record_in(SandboxState::Paused)
        };
        let has_started = AtomicBool::new(false);
        // The engine calls this closure right before it changes the guest.
        let mut commit = || {
            let changes = [JournalChange::Sandbox(paused.clone())];
            let is_written = self.0.journal.commit(&changes).is_ok();
            has_started.store(is_written, Ordering::Release);
            is_written
        };
        let step = steps::begin("rollback");
        entry.meter();
        let rolled_back = guest.roll_back(snapshot, &identity, &mut commit).await;
        entry.reset_meter();
        drop(step);
        match rolled_back {
            Ok(()) => {
                let took = requested_at.elapsed().as_secs_f64() * 1000.0;
                let record = Sandbox {
                    snapshot: Some(snapshot.to_owned()),
                    rollbacks,
                    boot_mode: Some(BootMode::Snapshot),
                    boot_ms: Some(took),
                    ..entry.record_in(SandboxState::Running)
                };
                // Other files of the guest are usable without the volumes. They are served later if
                // possible.
                // `false`: all volumes are mounted, not only those whose server has ended.
                if let Err(e) = self.mount_volumes(&record, &*guest, false).await {
                    tracing::warn!(sandbox = record.id, error = %e, "cannot mount the volumes of a sandbox");
                    self.serve_lost_volumes(entry);
                }
                // Without a record of the running guest, the next daemon would stop it.
                if !self.write_back(&record, &*guest).await {
                    return self
                        .replace_lost(entry, &*guest, requested_at, paused)
                        .await;
                }
                entry.set_record(record.clone());
                self.0.metrics.boot(BootMode::Snapshot, took);
                self.run_resume_hooks(&record, &guest).await;
                Ok(Some(record))
            }
            Err(RollbackFailure::Refused { reason }) => {
                tracing::debug!(
                    sandbox = before.id,
                    reason,
                    "a rollback in place was rejected"
                );
                // If `commit` has written the journal, the journal contains `paused`, although the
                // guest is unchanged and still runs.
                if has_started.load(Ordering::Acquire) && !self.write_back(&before, &*guest).await {
                    return self
                        .replace_lost(entry, &*guest, requested_at, paused)
                        .await;
                }
                Ok(None)
            }
            Err(RollbackFailure::Lost(e)) => {
                tracing::warn!(sandbox = before.id, error = %e, "a guest was lost during a rollback");
                self.replace_lost(entry, &*guest, requested_at, paused)
                    .await
            }
        }
    }

    /// Records that the sandbox is running, with the current handle of its guest. The next daemon
    /// would stop a guest that is not recorded. Returns whether the journal was written.
    async fn write_back(&self, record: &Sandbox, guest: &dyn Guest) -> bool {
        let _step = steps::begin("journal");
        let Ok(handle) = guest.handle().await else {
            return false;
        };
        let changes = [
            JournalChange::Sandbox(record.clone()),
            JournalChange::Guest(record.id.clone(), handle),
        ];
        self.0.journal.commit(&changes).is_ok()
    }

    /// Stops a guest whose state is unusable, and restores another. If the restore fails, the
    /// sandbox is paused in the snapshot, as in the record `paused`.
    async fn replace_lost(
        &self,
        entry: &Arc<SandboxEntry>,
        guest: &dyn Guest,
        requested_at: Instant,
        paused: Sandbox,
    ) -> Result<Option<Sandbox>, OperationError> {
        // Remove the guest first, so that `watch`, the task that waits for the exit of the guest,
        // does not mark the sandbox as broken when the guest stops.
        entry.replace_guest(None);
        guest.stop().await;
        let snapshot = paused.snapshot.clone().unwrap_or_default();
        let reason = RestoreReason::Rollback;
        let result = self
            .restore_existing(entry, requested_at, &snapshot, reason)
            .await;
        if result.is_err() {
            // The journal already contains this record.
            entry.set_record(paused);
        }
        result.map(Some)
    }
}

fn describe(template: &str, size: jiffy_engine_api::SandboxSize) -> String {
    format!(
        "{template} with {} vCPUs, {} MiB memory, {} MiB disk",
        size.vcpus, size.memory_mib, size.disk_mib
    )
}
