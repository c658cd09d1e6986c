//! `kill`, `promote` and the removal of records.
//!
//! The *journal* is the database of the daemon with the records of sandboxes and snapshots. The
//! `op_lock` of a sandbox serialises the operations on it.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use super::entry::SandboxEntry;
use super::{OperationError, Sandboxes};
use crate::journal::JournalChange;
use crate::sandbox::Sandbox;
use jiffy_api_types::{EventType, SandboxState};
use jiffy_engine_api::{Guest, steps};
use std::collections::HashSet;
use std::sync::Arc;

/// Maximum number of halted guests that are stopped in the background.
pub(super) const MAX_STOPPING_GUESTS: usize = 64;

impl Sandboxes {
    /// Kills a sandbox. Does not wait for an answer of the guest, of the VMM or of an operation in
    /// flight. Killing a sandbox twice is no error.
    pub async fn kill(&self, id: &str) -> Result<Sandbox, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("kill", &entry.id(), async move {
            this.expect_not_moved(&entry).await?;
            // From now on `watch`, the task that waits for the exit of the guest, and other
            // operations leave the final state to this kill.
            entry.set_ending(true);
            // The guest is halted before `op_lock` is taken, so that an operation that waits for
            // this guest fails at once.
            if let Some(guest) = entry.guest() {
                // The journal is written before the guest is halted, which takes some time. If the
                // daemon crashes meanwhile, the sandbox counts as killed and not as lost.
                let change = JournalChange::Sandbox(entry.record_in(SandboxState::Killed));
                this.0.journal.commit_write_behind(&[change]);
                entry.meter();
                guest.halt().await;
            }
            let _op_guard = entry.op_lock().lock().await;
            // An operation that held the lock may have installed another guest.
            let killed = this.kill_locked(&entry).await;
            entry.set_ending(false);
            killed
        })
        .await
    }

    /// Like [`Self::kill`]. The caller must hold the sandbox's `op_lock`.
    pub(super) async fn kill_locked(
        &self,
        entry: &SandboxEntry,
    ) -> Result<Sandbox, OperationError> {
        if !entry.is_ending() {
            entry.meter();
        }
        if let Some(guest) = entry.replace_guest(None) {
            self.stop_guest(guest).await;
        }
        let before = entry.record();
        if before.state == SandboxState::Killed {
            // The sandbox was killed before: the time of its end does not change.
            return Ok(before);
        }
        let mut record = entry.record_in(SandboxState::Killed);
        // The deadline may have caused the kill only if the sandbox was running.
        if before.state != SandboxState::Running {
            record.deadline_ms = None;
        }
        // A journal entry for an unregistered sandbox would be recovered as a sandbox.
        let is_registered = self.0.entries.lock().contains_key(entry.shared_id());
        if is_registered {
            self.record_write_behind(entry, record.clone());
            self.report_end(EventType::SandboxKilled, &before, &record, None);
        } else {
            // The create failed or the record was removed, so the journal has no record.
            entry.set_record(record.clone());
        }
        self.mark_killed(entry, &record);
        // A killed sandbox no longer counts as a user of its snapshot.
        self.0.gc.collect(record.snapshot.clone());
        if let Some(id) = &record.snapshot {
            self.snapshots().cancel_unused(id);
        }
        Ok(record)
    }

    /// Halts a guest, and stops it in the background: its process, memory and network slot are
    /// released later, for at most [`MAX_STOPPING_GUESTS`] guests at a time. A daemon that shuts
    /// down waits for this. After a killed daemon, the next one releases them.
    pub(super) async fn stop_guest(&self, guest: Arc<dyn Guest>) {
        let _step = steps::begin("stop");
        guest.halt().await;
        // The semaphore is never closed.
        let permit = self.0.stopping_guests.clone().acquire_owned().await;
        // The stop is counted even during a shutdown, since a shutdown must wait for stops that are
        // already needed.
        let operation = self.0.operations.count();
        tokio::spawn(async move {
            guest.stop().await;
            drop((permit, operation));
        });
    }

    /// Kills a sandbox and removes its record. Snapshots requested by clients remain.
    pub async fn remove(&self, id: &str) -> Result<Sandbox, OperationError> {
        let entry = self.0.entry(id)?;
        let record = self.kill(&entry.id()).await?;
        // Wait for a concurrent kill, which would write the record again.
        let _op_guard = entry.op_lock().lock().await;
        let change = JournalChange::NoSandbox(record.id.clone());
        self.0.journal.commit_write_behind(&[change]);
        self.0.entries.lock().remove(entry.shared_id());
        Ok(record)
    }

    /// Retains one child of a fork and removes its siblings and all of their descendants. Returns
    /// the removed sandboxes.
    pub async fn promote(&self, id: &str) -> Result<Vec<Sandbox>, OperationError> {
        let promoted = self.get(id)?;
        let Some(parent) = &promoted.forked_from else {
            return Ok(Vec::new());
        };
        // Forks form a tree. Each pass adds the children of the sandboxes found so far.
        let all = self.list();
        let mut removals: HashSet<String> = all
            .iter()
            .filter(|r| r.forked_from.as_ref() == Some(parent) && r.id != promoted.id)
            .map(|r| r.id.clone())
            .collect();
        loop {
            let before = removals.len();
            let further = all
                .iter()
                .filter(|r| r.forked_from.as_ref().is_some_and(|p| removals.contains(p)))
                .map(|r| r.id.clone())
                .collect::<Vec<_>>();
            removals.extend(further);
            if removals.len() == before {
                break;
            }
        }
        let mut removed = Vec::new();
        for id in removals {
            match self.remove(&id).await {
                Ok(record) => removed.push(record),
                // A concurrent request removed it.
                Err(OperationError::Unknown { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        self.report_with(EventType::SandboxPromoted, &promoted, |event| {
            event.count = u64::try_from(removed.len()).ok();
        });
        Ok(removed)
    }
}
