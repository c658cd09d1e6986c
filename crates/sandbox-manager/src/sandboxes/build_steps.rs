//! Operations for the template builder: snapshots at the end of build steps, which later builds
//! reuse, and a client of the agent in a build's sandbox.

use super::take_snapshot::{SnapshotKind, record_after_snapshot};
use super::{OperationError, Sandboxes, SandboxesInner};
use crate::journal::JournalChange;
use crate::sandbox::SandboxOperation;
use crate::snapshot::Snapshot;
use jiffy_agent_client::AgentClient;
use jiffy_api_types::{SnapshotContent, SnapshotPurpose};
use jiffy_engine_api::AfterSnapshot;
use jiffy_proto::agent::ENVD_PORT;
use std::io;
use std::sync::Arc;

/// Snapshots at the end of the steps of template builds.
#[derive(Clone, Copy)]
pub struct BuildSteps<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Returns the operations on snapshots of build steps.
    pub fn build_steps(&self) -> BuildSteps<'_> {
        BuildSteps(&self.0)
    }
}

impl Sandboxes {
    /// Returns a client of the agent in a sandbox. The client sends the sandbox's access token, if
    /// the sandbox has one.
    pub fn agent(&self, id: &str) -> Result<AgentClient, OperationError> {
        let record = self.get(id)?;
        let (this, id) = (self.clone(), record.id);
        // Each connection looks up the current guest, so the client remains usable after a
        // rollback.
        let client = AgentClient::new(move || {
            let (this, id) = (this.clone(), id.clone());
            async move { this.connect(&id, ENVD_PORT).await.map_err(io::Error::other) }
        });
        Ok(match record.agent_token {
            Some(token) => client.with_token(token),
            None => client,
        })
    }
}

impl BuildSteps<'_> {
    /// Takes a snapshot of a running sandbox. Later builds look up the snapshot by `key`. The
    /// snapshot is retained until it is released.
    ///
    /// # Errors
    /// Also fails if the engine cannot store `content`.
    pub async fn snapshot(
        self,
        id: &str,
        key: &str,
        content: SnapshotContent,
    ) -> Result<Snapshot, OperationError> {
        let this = Sandboxes(self.0.clone());
        let entry = self.0.entry(id)?;
        let key = key.to_owned();
        this.clone()
            .perform("snapshot", &entry.id(), async move {
                let _op_guard = entry.op_lock().lock().await;
                let sandbox = entry.allow(SandboxOperation::Snapshot, "snapshot")?;
                let guest = entry.running(SandboxOperation::Snapshot, "snapshot")?;
                let draft = Snapshot {
                    // The key of the step, a hash of all its inputs, is the fingerprint by which
                    // the index finds the snapshot.
                    fingerprint: key,
                    retained: true,
                    ..this.snapshots().draft(
                        &sandbox,
                        &*guest,
                        SnapshotKind {
                            content,
                            ..SnapshotKind::full(SnapshotPurpose::Step)
                        },
                    )?
                };
                let permit = this.budgets().reserve_snapshot(&draft, &sandbox).await?;
                let snapshot = this
                    .snapshots()
                    .take(&*guest, draft, AfterSnapshot::Resume, &permit, |snapshot| {
                        vec![JournalChange::Sandbox(record_after_snapshot(
                            &entry, snapshot,
                        ))]
                    })
                    .await?;
                // The record is set in memory only: `take` has committed it to the journal.
                entry.set_record(record_after_snapshot(&entry, &snapshot));
                Ok(snapshot)
            })
            .await
    }

    /// Returns the newest snapshot of the step `key`.
    pub fn newest(self, key: &str) -> Option<Snapshot> {
        let snapshots = self.0.catalog.read();
        let steps = snapshots.retained_for(SnapshotPurpose::Step, key);
        // Concurrent builds may have taken several snapshots of one step.
        steps.max_by_key(|s| s.created_ms).cloned()
    }

    /// Returns all snapshots of steps, oldest first.
    pub fn list(self) -> Vec<Snapshot> {
        let snapshots = self.0.catalog.read();
        let steps = snapshots.all_retained_for(SnapshotPurpose::Step);
        let mut steps: Vec<_> = steps.cloned().collect();
        steps.sort_by_key(|s| s.created_ms);
        steps
    }
}
