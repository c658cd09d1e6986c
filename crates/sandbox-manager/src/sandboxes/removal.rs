//! `kill`, `promote` and the removal of records.

use super::entry::SandboxEntry;
use super::{OperationError, Sandboxes};
use crate::journal::JournalChange;
use crate::sandbox::Sandbox;
use jiffy_api_types::SandboxState;
use jiffy_engine_api::{Guest, steps};
use std::collections::HashSet;
use std::sync::Arc;

/// Most guests that are ending behind answers; further ones are waited for.
pub(super) const MAX_ENDING_GUESTS: usize = 64;

impl Sandboxes {
    /// Ends a sandbox. Needs nothing of its guest, of its VMM or of an operation under way; killing
    /// twice is no error.
    pub async fn kill(&self, id: &str) -> Result<Sandbox, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("kill", &entry.id(), async move {
            entry.set_ending(true);
            // Before its turn: an operation that waits for this guest fails at once.
            if let Some(guest) = entry.guest() {
                // Before its guest goes, which takes its time: a daemon that dies meanwhile has
                // killed it, and not lost it.
                let change = JournalChange::Sandbox(entry.record_in(SandboxState::Killed));
                this.0.journal.commit_write_behind(&[change]);
                guest.halt().await;
            }
            let _op_guard = entry.op_lock().lock().await;
            // An operation that was under way may have made another guest.
            let killed = this.kill_held(&entry).await;
            entry.set_ending(false);
            killed
        })
        .await
    }

    /// The same for whoever has the turn.
    pub(super) async fn kill_held(&self, entry: &SandboxEntry) -> Result<Sandbox, OperationError> {
        if let Some(guest) = entry.replace_guest(None) {
            self.end_guest(guest).await;
        }
        let mut record = entry.record_in(SandboxState::Killed);
        // A deadline ends only what runs: of one that slept or was broken it is not why it ended.
        if entry.record().state != SandboxState::Running {
            record.deadline_ms = None;
        }
        let known = self.0.entries.lock().contains_key(entry.shared_id());
        if known {
            self.record_write_behind(entry, record.clone());
        } else {
            // Its making failed, or its record was removed: the journal hears no more of it.
            entry.set_record(record.clone());
        }
        self.snapshots().gc(record.snapshot.clone());
        if let Some(id) = &record.snapshot {
            self.snapshots().cancel_unused(id);
        }
        Ok(record)
    }

    /// Ends a guest: it runs no more when this returns. What is left of it (process, memory,
    /// network slot) goes behind that, [`MAX_ENDING_GUESTS`] at a time; a daemon that stops waits
    /// for it, and the one after a daemon that was killed removes it.
    pub(super) async fn end_guest(&self, guest: Arc<dyn Guest>) {
        let _step = steps::begin("stop");
        guest.halt().await;
        // The semaphore is never closed.
        let permit = self.0.endings.clone().acquire_owned().await;
        let operation = self.0.operations.count();
        tokio::spawn(async move {
            guest.stop().await;
            drop((permit, operation));
        });
    }

    /// Kills a sandbox and forgets it. Snapshots that were asked for stay.
    pub async fn remove(&self, id: &str) -> Result<Sandbox, OperationError> {
        let entry = self.0.entry(id)?;
        let record = self.kill(&entry.id()).await?;
        // Another kill that is under way must not write it down again.
        let _op_guard = entry.op_lock().lock().await;
        let change = JournalChange::NoSandbox(record.id.clone());
        self.0.journal.commit_write_behind(&[change]);
        self.0.entries.lock().remove(entry.shared_id());
        Ok(record)
    }

    /// Keeps one child of a fork and removes its siblings with everything that was forked from
    /// them. Returns those removed.
    pub async fn promote(&self, id: &str) -> Result<Vec<Sandbox>, OperationError> {
        let chosen = self.get(id)?;
        let Some(parent) = &chosen.forked_from else {
            return Ok(Vec::new());
        };
        let all = self.list();
        let mut doomed: HashSet<String> = all
            .iter()
            .filter(|r| r.forked_from.as_ref() == Some(parent) && r.id != chosen.id)
            .map(|r| r.id.clone())
            .collect();
        loop {
            let before = doomed.len();
            let further = all
                .iter()
                .filter(|r| r.forked_from.as_ref().is_some_and(|p| doomed.contains(p)))
                .map(|r| r.id.clone())
                .collect::<Vec<_>>();
            doomed.extend(further);
            if doomed.len() == before {
                break;
            }
        }
        let mut removed = Vec::new();
        for id in doomed {
            match self.remove(&id).await {
                Ok(record) => removed.push(record),
                // Another request was faster.
                Err(OperationError::Unknown { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(removed)
    }
}
