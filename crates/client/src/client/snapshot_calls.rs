//! Taking a snapshot.

use super::Client;
use jiffy_api_types::{Snapshot, SnapshotInfo, SnapshotSandbox};

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
    ) -> anyhow::Result<SnapshotInfo> {
        let body = SnapshotSandbox {
            name: name.map(str::to_owned),
            durable: (ack == SnapshotAck::Durable).then_some(true),
            ack: (ack == SnapshotAck::Captured).then_some(jiffy_api_types::SnapshotAck::Captured),
            memory: None,
        };
        let taken: Snapshot = self.call_sandbox(id, "snapshots", &body).await?;
        Ok(taken.jiffy)
    }
}
