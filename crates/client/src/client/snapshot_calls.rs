//! Requests for snapshots.

use super::Client;
use jiffy_api_types::{Snapshot, SnapshotInfo, SnapshotSandbox};

/// Moment at which a request for a snapshot returns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SnapshotAck {
    /// After its memory is captured in a process that survives the daemon.
    Captured,
    /// After its files are complete on the host.
    #[default]
    Stored,
    /// After it is complete in the shared store.
    Durable,
}

impl Client {
    /// Takes a snapshot and waits until `ack`.
    pub async fn snapshot_sandbox(
        &self,
        id: &str,
        name: Option<&str>,
        ack: SnapshotAck,
    ) -> anyhow::Result<SnapshotInfo> {
        let body = SnapshotSandbox {
            name: name.map(str::to_owned),
            durable: (ack == SnapshotAck::Durable).then_some(true),
            ack: (ack == SnapshotAck::Captured).then_some(jiffy_api_types::SnapshotAck::Captured),
            memory: None,
        };
        let snapshot: Snapshot = self.call_sandbox(id, "snapshots", &body).await?;
        Ok(snapshot.jiffy)
    }
}
