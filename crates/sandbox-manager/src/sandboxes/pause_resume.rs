//! `pause` and `resume`: a paused sandbox is stored as a snapshot and uses no memory.
//!
//! The `op_lock` of a sandbox serialises the operations on it.

use super::entry::SandboxEntry;
use super::events::pause_cause;
use super::guest_hooks::HookMoment;
use super::resume_options::{RestoreReason, ResumeOptions, ResumeTimeout};
use super::take_snapshot::SnapshotKind;
use super::{OperationError, Sandboxes};
use crate::journal::JournalChange;
use crate::sandbox::{Sandbox, SandboxOperation};
use jiffy_api_types::{EventType, SandboxState, SnapshotContent, SnapshotPurpose};
use jiffy_engine_api::{AfterSnapshot, Guest};
use std::sync::Arc;
use std::time::Instant;

impl Sandboxes {
    /// Pauses a sandbox: stores its changes since its parent snapshot, and stops its guest, which
    /// frees the memory.
    pub async fn pause(&self, id: &str) -> Result<Sandbox, OperationError> {
        self.pause_with(id, SnapshotContent::Full).await
    }

    /// Like [`Self::pause`]. Without memory, the guest boots from its disk at the next resume.
    pub async fn pause_with(
        &self,
        id: &str,
        content: SnapshotContent,
    ) -> Result<Sandbox, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("pause", &entry.id(), async move {
            let _op_guard = entry.op_lock().lock().await;
            this.pause_locked(&entry, content).await
        })
        .await
    }

    /// Like [`Self::pause_with`]. The caller must hold the sandbox's `op_lock`.
    pub(super) async fn pause_locked(
        &self,
        entry: &SandboxEntry,
        content: SnapshotContent,
    ) -> Result<Sandbox, OperationError> {
        self.pause_locked_for(entry, content, None).await
    }

    /// Like [`Self::pause_locked`], with the cause of the pause for its event. `None` if a request
    /// or the deadline causes the pause.
    pub(super) async fn pause_locked_for(
        &self,
        entry: &SandboxEntry,
        content: SnapshotContent,
        cause: Option<&'static str>,
    ) -> Result<Sandbox, OperationError> {
        let guest = entry.running(SandboxOperation::Pause, "pause")?;
        let sandbox = entry.record();
        let kind = SnapshotKind {
            content,
            ..SnapshotKind::full(SnapshotPurpose::Pause)
        };
        let moment = HookMoment::BeforePause;
        let has_hooks = self.run_hooks(&sandbox, &guest, moment).await;
        let paused = self.pause_guest(entry, sandbox, guest.clone(), kind, cause);
        let paused = paused.await;
        if has_hooks && let Err(e) = &paused {
            // The guest continues.
            tracing::debug!(error = %e, "a pause failed after its hooks");
            self.run_resume_hooks(&entry.record(), &guest).await;
        }
        paused
    }

    /// Stores the state of `guest` and stops it. The caller must hold `op_lock`.
    async fn pause_guest(
        &self,
        entry: &SandboxEntry,
        sandbox: Sandbox,
        guest: Arc<dyn Guest>,
        kind: SnapshotKind,
        cause: Option<&'static str>,
    ) -> Result<Sandbox, OperationError> {
        let draft = self.snapshots().draft(&sandbox, &*guest, kind)?;
        let parent = draft.parent.clone();
        // Until the new record is in memory, the permit stands for the paused sandbox in the usage
        // of its owner, and the pin protects the snapshot from garbage collection.
        let permit = self.budgets().reserve_snapshot(&draft, &sandbox).await?;
        let pin = self.0.catalog.pin(&draft.id);
        entry.meter();
        // The record is computed before the snapshot, so that both are committed together.
        let paused = Sandbox {
            snapshot: Some(draft.id.clone()),
            pause_cause: pause_cause(&sandbox, cause),
            ..entry.record_in(SandboxState::Paused)
        };
        self.snapshots()
            .take(&*guest, draft, AfterSnapshot::Stop, &permit, |_| {
                vec![JournalChange::Sandbox(paused.clone())]
            })
            .await?;
        // The snapshot is committed: from here on the pause cannot fail.
        entry.replace_guest(None);
        entry.set_record(paused.clone());
        self.report_end(EventType::SandboxPaused, &sandbox, &paused, cause);
        drop((pin, permit));
        self.stop_guest(guest).await;
        // The paused sandbox needs its own snapshot, but perhaps not the parent's record.
        self.0.gc.collect(parent);
        if let Some(id) = &paused.snapshot {
            self.snapshots().shorten_paused(id);
        }
        Ok(paused)
    }

    /// Resumes a paused sandbox. Also restarts a sandbox from its latest snapshot if the sandbox
    /// broke because memory was missing. The timeout starts again.
    pub async fn resume(&self, id: &str) -> Result<Sandbox, OperationError> {
        self.resume_with(id, ResumeOptions::default()).await
    }

    /// Resumes a sandbox and applies `options` before any other operation can run.
    pub async fn resume_with(
        &self,
        id: &str,
        options: ResumeOptions,
    ) -> Result<Sandbox, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("resume", &entry.id(), async move {
            let _op_guard = entry.op_lock().lock().await;
            entry.allow(SandboxOperation::Resume, "resume")?;
            this.resume_locked(&entry, options).await
        })
        .await
    }

    /// Resumes a sandbox unless it is running. Returns whether it was resumed. The deadline of a
    /// running sandbox does not change.
    pub async fn ensure_running(&self, id: &str) -> Result<(Sandbox, bool), OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        // Metrics and traces contain this name, so it must not change.
        self.perform("wake", &entry.id(), async move {
            let _op_guard = entry.op_lock().lock().await;
            let record = entry.record();
            if record.state == SandboxState::Running {
                return Ok((record, false));
            }
            entry.allow(SandboxOperation::Resume, "resume")?;
            let options = ResumeOptions::default();
            Ok((this.resume_locked(&entry, options).await?, true))
        })
        .await
    }

    /// Resumes a sandbox unless it is running, and sets its timeout, under one `op_lock`: an
    /// earlier deadline cannot expire between the two steps. Returns whether it was resumed.
    pub async fn ensure_running_for(
        &self,
        id: &str,
        time: ResumeTimeout,
    ) -> Result<(Sandbox, bool), OperationError> {
        let options = ResumeOptions {
            time,
            ..ResumeOptions::default()
        };
        self.ensure_running_with(id, options).await
    }

    /// Like [`Self::ensure_running_for`]. For a running sandbox, only the timeout of `options`
    /// takes effect.
    pub async fn ensure_running_with(
        &self,
        id: &str,
        options: ResumeOptions,
    ) -> Result<(Sandbox, bool), OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("wake", &entry.id(), async move {
            let _op_guard = entry.op_lock().lock().await;
            if entry.record().state == SandboxState::Running {
                return Ok((this.set_resume_timeout(&entry, options.time)?, false));
            }
            entry.allow(SandboxOperation::Resume, "resume")?;
            Ok((this.resume_locked(&entry, options).await?, true))
        })
        .await
    }

    /// Resumes a sandbox whose `op_lock` the caller holds.
    async fn resume_locked(
        &self,
        entry: &Arc<SandboxEntry>,
        options: ResumeOptions,
    ) -> Result<Sandbox, OperationError> {
        // A host that is being drained starts no paused sandbox (`resume_hold.rs`).
        if let Err(e) = self.expect_no_hold(entry) {
            let refused = Err(e);
            self.end_adoption(entry, &refused);
            return refused;
        }
        if options.reboot {
            self.discard_memory(entry).await?;
        }
        self.restore_paused(entry, options).await
    }

    /// Replaces the snapshot of a paused sandbox by a snapshot without memory. The guest writes its
    /// changes to its disk first, because the disk alone is not consistent.
    async fn discard_memory(&self, entry: &Arc<SandboxEntry>) -> Result<(), OperationError> {
        let record = entry.record();
        let owner = record.settings.owner.as_deref();
        let id = record.snapshot.as_deref().unwrap_or_default();
        let (snapshot, _pin) = self.snapshots().pin_or_fetch(owner, id).await?;
        if !snapshot.content.is_full() {
            return Ok(());
        }
        self.check_content(Some(&snapshot.engine), SnapshotContent::Filesystem)?;
        self.restore_paused(entry, ResumeOptions::default()).await?;
        let paused = self.pause_locked(entry, SnapshotContent::Filesystem).await;
        if let Err(e) = paused {
            // The sandbox stays paused, with its memory.
            self.pause_locked(entry, SnapshotContent::Full).await?;
            return Err(e);
        }
        Ok(())
    }

    /// Restores a paused sandbox from its snapshot. The caller must hold `op_lock`.
    async fn restore_paused(
        &self,
        entry: &Arc<SandboxEntry>,
        options: ResumeOptions,
    ) -> Result<Sandbox, OperationError> {
        let requested_at = Instant::now();
        let record = entry.record();
        // No snapshot has the empty id, so a sandbox without a snapshot fails as unknown snapshot.
        let snapshot = record.snapshot.as_deref().unwrap_or_default();
        // Reserve the memory before the restore, which needs it. `restore_existing` releases the
        // reservation after a failure.
        match self.admit(record.size) {
            Ok(reservation) => entry.set_reservation(Some(reservation)),
            Err(e) => {
                let refused = Err(e);
                // This call removes a sandbox of another host whose first resume on this host
                // failed.
                self.end_adoption(entry, &refused);
                return refused;
            }
        }
        let reason = RestoreReason::Resume(options);
        let resumed = self.restore_existing(entry, requested_at, snapshot, reason);
        let resumed = resumed.await?;
        self.report(EventType::SandboxResumed, &resumed);
        Ok(resumed)
    }
}
