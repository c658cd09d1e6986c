//! `pause` and `resume`: a sandbox that holds no memory while nobody needs it.

use super::entry::Entry;
use super::{OperationError, Sandboxes};
use crate::journal::Change;
use crate::record::{Operation, Purpose, SandboxRecord, State};
use jiffy_engine::{AfterSnapshot, Engine, Guest};
use std::sync::Arc;
use std::time::Instant;

impl<E: Engine> Sandboxes<E> {
    /// Puts a sandbox to sleep in a snapshot of what changed since the one it came from. Its memory is free afterwards.
    pub async fn pause(&self, id: &str) -> Result<SandboxRecord, OperationError> {
        let (this, entry) = (self.clone(), self.entry(id)?);
        self.perform("pause", &entry.id(), async move {
            let _turn = entry.turn.lock().await;
            this.pause_held(&entry).await
        })
        .await
    }

    /// The same for whoever has the turn.
    pub(super) async fn pause_held(
        &self,
        entry: &Entry<E::Guest>,
    ) -> Result<SandboxRecord, OperationError> {
        let guest = entry.running(Operation::Pause, "pause")?;
        let draft = self.draft(&entry.record(), Purpose::Pause, None)?;
        let pin = self.hold(&draft.id);
        let paused = SandboxRecord {
            snapshot: Some(draft.id.clone()),
            ..entry.record_in(State::Paused)
        };
        self.take(&guest, draft, AfterSnapshot::Stop, |_| {
            vec![Change::Sandbox(paused.clone())]
        })
        .await?;
        entry.replace_guest(None);
        entry.set_record(paused.clone());
        drop(pin);
        guest.stop().await;
        self.collect();
        Ok(paused)
    }

    /// Wakes a sandbox. Its time begins anew.
    pub async fn resume(&self, id: &str) -> Result<SandboxRecord, OperationError> {
        let (this, entry) = (self.clone(), self.entry(id)?);
        self.perform("resume", &entry.id(), async move {
            let _turn = entry.turn.lock().await;
            entry.allow(Operation::Resume, "resume")?;
            this.resume_held(&entry).await
        })
        .await
    }

    /// Makes sure that a sandbox runs; says whether it had to be woken.
    pub async fn wake(&self, id: &str) -> Result<(SandboxRecord, bool), OperationError> {
        let (this, entry) = (self.clone(), self.entry(id)?);
        self.perform("wake", &entry.id(), async move {
            let _turn = entry.turn.lock().await;
            let record = entry.record();
            if record.state == State::Running {
                return Ok((record, false));
            }
            entry.allow(Operation::Resume, "wake")?;
            Ok((this.resume_held(&entry).await?, true))
        })
        .await
    }

    async fn resume_held(
        &self,
        entry: &Arc<Entry<E::Guest>>,
    ) -> Result<SandboxRecord, OperationError> {
        let asked = Instant::now();
        let record = entry.record();
        let snapshot = record.snapshot.as_deref().unwrap_or_default();
        entry.set_place(Some(self.admit(record.size)?));
        self.revive(entry, asked, &record.template, snapshot, false)
            .await
    }
}
