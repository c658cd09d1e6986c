//! Taking a snapshot.

use super::Client;
use super::calls::Snapshot;
use jiffy_sandbox_manager::SnapshotRecord;
use serde_json::json;

/// When a call to take a snapshot returns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SnapshotAck {
    /// Once its memory is frozen in a process that survives the daemon.
    Captured,
    /// Once its files are complete on the host.
    #[default]
    Stored,
    /// Once the store that hosts share has it.
    Durable,
}

impl Client {
    /// Takes a snapshot, until `ack`.
    pub async fn snapshot_sandbox(
        &self,
        id: &str,
        name: Option<&str>,
        ack: SnapshotAck,
    ) -> anyhow::Result<SnapshotRecord> {
        let body = match ack {
            SnapshotAck::Captured => json!({ "name": name, "ack": "captured" }),
            SnapshotAck::Stored => json!({ "name": name }),
            SnapshotAck::Durable => json!({ "name": name, "durable": true }),
        };
        let taken: Snapshot = self.call_sandbox(id, "snapshots", &body).await?;
        Ok(taken.record)
    }
}
