//! `pause` and `resume`: a sandbox that holds no memory while nobody needs it.

use super::{OperationError, Sandboxes, detached};
use crate::journal::Change;
use crate::record::{Operation, Purpose, SandboxRecord, State};
use jiffy_engine::{AfterSnapshot, BootMode, Engine, Guest};
use std::time::Instant;

impl<E: Engine> Sandboxes<E> {
    /// Puts a sandbox to sleep in a snapshot of what changed since the one it came from. Its memory is free afterwards.
    pub async fn pause(&self, id: &str) -> Result<SandboxRecord, OperationError> {
        let (this, entry) = (self.clone(), self.entry(id)?);
        detached(async move {
            let _turn = entry.turn.lock().await;
            let guest = entry.running(Operation::Pause, "pause")?;
            let draft = this.draft(&entry.record(), Purpose::Pause, None)?;
            let paused = SandboxRecord {
                snapshot: Some(draft.id.clone()),
                ..entry.record_in(State::Paused)
            };
            this.take(&guest, draft, AfterSnapshot::Stop, |_| {
                vec![Change::Sandbox(paused.clone())]
            })
            .await?;
            entry.replace_guest(None);
            entry.set_record(paused.clone());
            guest.stop().await;
            this.collect()?;
            Ok(paused)
        })
        .await
    }

    /// Wakes a sandbox.
    pub async fn resume(&self, id: &str) -> Result<SandboxRecord, OperationError> {
        let (this, entry) = (self.clone(), self.entry(id)?);
        detached(async move {
            let _turn = entry.turn.lock().await;
            let asked = Instant::now();
            let record = entry.allow(Operation::Resume, "resume")?;
            let snapshot = record.snapshot.as_deref().unwrap_or_default();
            let origin = this
                .origin_in_snapshot(&record.template, snapshot, BootMode::Snapshot)
                .await?;
            this.install(&entry, asked, origin).await
        })
        .await
    }
}
