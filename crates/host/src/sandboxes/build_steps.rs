//! Operations for template builds: sandboxes at the end of a step, and templates that are ready to
//! be used.

use super::entry::lock;
use super::take_snapshot::descended;
use super::{OperationError, Sandboxes};
use crate::journal::JournalChange;
use crate::records::{SandboxOperation, SnapshotPurpose, SnapshotRecord};
use jiffy_agent_client::AgentClient;
use jiffy_engine::{AfterSnapshot, Engine, SandboxSize};
use jiffy_proto::agent::ENVD_PORT;
use std::io;

impl<E: Engine> Sandboxes<E> {
    /// Returns a fingerprint of what everything made from `template` in this size depends on:
    /// image, kernel, agent, VMM.
    pub async fn fingerprint(
        &self,
        template: &str,
        size: SandboxSize,
    ) -> Result<String, OperationError> {
        let word = self.0.engine.fingerprint(None, template, size).await;
        word.map_err(OperationError::engine(format!("use template `{template}`")))
    }

    /// Makes sure that sandboxes of `template` in this size need not be booted: what it starts is
    /// ready when this returns.
    pub async fn make_ready(
        &self,
        template: &str,
        size: SandboxSize,
    ) -> Result<SnapshotRecord, OperationError> {
        let fingerprint = self.template_fingerprint(None, template, size).await?;
        let id = self.template_snapshot(None, template, size, &fingerprint);
        let id = id.await?;
        Ok(self.pin(&id)?.0)
    }

    /// Takes a snapshot of a running sandbox that later builds find by `key`. It is kept until it
    /// is released.
    pub async fn snapshot_step(
        &self,
        id: &str,
        key: &str,
    ) -> Result<SnapshotRecord, OperationError> {
        let (this, entry) = (self.clone(), self.entry(id)?);
        let key = key.to_owned();
        self.perform("snapshot", &entry.id(), async move {
            let _op_guard = entry.op_lock.lock().await;
            let sandbox = entry.allow(SandboxOperation::Snapshot, "snapshot")?;
            let guest = entry.running(SandboxOperation::Snapshot, "snapshot")?;
            let draft = SnapshotRecord {
                fingerprint: key,
                kept: true,
                ..this.draft(&sandbox, SnapshotPurpose::Step, None)?
            };
            let permit = this.reserve_snapshot(&draft, &sandbox).await?;
            let snapshot = this
                .take(&guest, draft, AfterSnapshot::Resume, &permit, |snapshot| {
                    vec![JournalChange::Sandbox(descended(&sandbox, snapshot))]
                })
                .await?;
            entry.set_record(descended(&sandbox, &snapshot));
            Ok(snapshot)
        })
        .await
    }

    /// The newest snapshot of the step `key`.
    pub fn step(&self, key: &str) -> Option<SnapshotRecord> {
        let snapshots = lock(&self.0.snapshots);
        let kept = snapshots.kept_for(SnapshotPurpose::Step, key);
        kept.max_by_key(|s| s.created_ms).cloned()
    }

    /// All snapshots of steps, the oldest first.
    pub fn steps(&self) -> Vec<SnapshotRecord> {
        let snapshots = lock(&self.0.snapshots);
        let steps = snapshots
            .values()
            .filter(|s| s.purpose == SnapshotPurpose::Step);
        let mut steps: Vec<_> = steps.filter(|s| s.kept).cloned().collect();
        steps.sort_by_key(|s| s.created_ms);
        steps
    }

    /// A client of the agent in a sandbox, with its token.
    pub fn agent(&self, id: &str) -> Result<AgentClient, OperationError> {
        let record = self.get(id)?;
        let (this, id) = (self.clone(), record.id);
        let client = AgentClient::new(move || {
            let (this, id) = (this.clone(), id.clone());
            async move { this.connect(&id, ENVD_PORT).await.map_err(io::Error::other) }
        });
        Ok(match record.agent_token {
            Some(token) => client.with_token(token),
            None => client,
        })
    }

    /// The booted template `from` is that of `to` from now on, which is the same by another name.
    pub fn hand_over_template(&self, from: &str, to: &str) {
        let of_template = |s: &SnapshotRecord| {
            s.purpose == SnapshotPurpose::Template && s.template == from && s.kept
        };
        for id in self.ids_of(of_template) {
            if let Some(newest) = self.update_snapshot(&id, |s| s.template = to.to_owned()) {
                self.retire_older(&newest);
            }
        }
    }
}
