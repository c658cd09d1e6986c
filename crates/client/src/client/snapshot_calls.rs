//! Requests for snapshots.

use super::Client;
use jiffy_api_types::{Snapshot, SnapshotInfo, SnapshotSandbox};

/// Event after which a request for a snapshot returns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SnapshotAck {
    /// The default of the key, then of the daemon.
    #[default]
    Default,
    /// The memory is captured in a process that survives the daemon.
    Captured,
    /// The snapshot's files are complete on the host.
    Stored,
    /// The snapshot is complete in the shared store.
    Durable,
}

impl Client {
    /// Takes a snapshot and waits for the event `ack`.
    pub async fn snapshot_sandbox(
        &self,
        id: &str,
        name: Option<&str>,
        ack: SnapshotAck,
    ) -> anyhow::Result<SnapshotInfo> {
        self.take_snapshot(id, name, ack, None).await
    }

    /// Like [`Self::snapshot_sandbox`], without the memory.
    pub async fn snapshot_disk(
        &self,
        id: &str,
        name: Option<&str>,
        ack: SnapshotAck,
    ) -> anyhow::Result<SnapshotInfo> {
        self.take_snapshot(id, name, ack, Some(false)).await
    }

    /// Takes a snapshot. `ack` determines when the call returns. With `memory` as `false`, only the
    /// disk is stored.
    async fn take_snapshot(
        &self,
        id: &str,
        name: Option<&str>,
        ack: SnapshotAck,
        memory: Option<bool>,
    ) -> anyhow::Result<SnapshotInfo> {
        let body = SnapshotSandbox {
            name: name.map(str::to_owned),
            durable: (ack == SnapshotAck::Durable).then_some(true),
            ack: match ack {
                SnapshotAck::Captured => Some(jiffy_api_types::SnapshotAck::Captured),
                SnapshotAck::Stored => Some(jiffy_api_types::SnapshotAck::Stored),
                SnapshotAck::Default | SnapshotAck::Durable => None,
            },
            memory,
        };
        let snapshot: Snapshot = self.call_sandbox(id, "snapshots", &body).await?;
        Ok(snapshot.jiffy)
    }
}
