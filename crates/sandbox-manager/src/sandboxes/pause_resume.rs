//! `pause` and `resume`: a paused sandbox is stored as a snapshot and uses no memory.

use super::entry::SandboxEntry;
use super::resume_options::{RestoreReason, ResumeOptions, ResumeTimeout};
use super::{OperationError, Sandboxes};
use crate::journal::JournalChange;
use crate::sandbox::{Sandbox, SandboxOperation};
use jiffy_api_types::{EventType, SandboxState, SnapshotPurpose};
use jiffy_engine_api::AfterSnapshot;
use std::sync::Arc;
use std::time::Instant;

impl Sandboxes {
    /// Pauses a sandbox: stores its changes since its parent snapshot, and stops its guest, which
    /// frees the memory.
    pub async fn pause(&self, id: &str) -> Result<Sandbox, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("pause", &entry.id(), async move {
            let _op_guard = entry.op_lock().lock().await;
            this.pause_locked(&entry).await
        })
        .await
    }

    /// Like [`Self::pause`]. The caller must hold the sandbox's `op_lock`.
    pub(super) async fn pause_locked(
        &self,
        entry: &SandboxEntry,
    ) -> Result<Sandbox, OperationError> {
        let guest = entry.running(SandboxOperation::Pause, "pause")?;
        let sandbox = entry.record();
        let draft = self
            .snapshots()
            .draft(&sandbox, &*guest, SnapshotPurpose::Pause, None)?;
        let parent = draft.parent.clone();
        // Until the new record is in memory, the permit stands for the paused sandbox in the usage
        // of its owner, and the pin protects the snapshot from garbage collection.
        let permit = self.budgets().reserve_snapshot(&draft, &sandbox).await?;
        let pin = self.0.catalog.pin(&draft.id);
        // Computed before the snapshot, so that the record is committed together with it.
        let paused = Sandbox {
            snapshot: Some(draft.id.clone()),
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
        self.report_end(EventType::SandboxPaused, &sandbox, &paused);
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
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("wake", &entry.id(), async move {
            let _op_guard = entry.op_lock().lock().await;
            if entry.record().state == SandboxState::Running {
                return Ok((this.set_resume_timeout(&entry, time)?, false));
            }
            entry.allow(SandboxOperation::Resume, "resume")?;
            let options = ResumeOptions {
                time,
                ..ResumeOptions::default()
            };
            Ok((this.resume_locked(&entry, options).await?, true))
        })
        .await
    }

    async fn resume_locked(
        &self,
        entry: &Arc<SandboxEntry>,
        options: ResumeOptions,
    ) -> Result<Sandbox, OperationError> {
        let requested_at = Instant::now();
        let record = entry.record();
        // No snapshot has the empty id, so a sandbox without a snapshot fails as unknown snapshot.
        let snapshot = record.snapshot.as_deref().unwrap_or_default();
        // Reserved before the restore, which needs the memory. `restore_existing` releases the
        // reservation after a failure.
        match self.admit(record.size) {
            Ok(reservation) => entry.set_reservation(Some(reservation)),
            Err(e) => {
                let refused = Err(e);
                // Removes a sandbox of another host whose first resume on this host failed.
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
