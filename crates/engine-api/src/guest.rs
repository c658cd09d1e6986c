//! Guests before and after they have an identity.

use crate::{
    AfterSnapshot, BootReport, CaptureNotice, ConnectionLog, EngineError, ExitReason, GuestStream,
    GuestUsage, NetworkRules, RollbackFailure, SnapshotTimes,
};
use async_trait::async_trait;
use jiffy_proto::agent::SiteSettings;
use jiffy_proto::snapshot::FoldedLayers;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use tokio::net::UnixStream;

/// Identity of a sandbox. Clock and entropy are added when it is assigned.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxIdentity {
    /// Sandbox id; also its host name.
    pub id: String,
    /// Id of its template as its owner knows it, for programs in the sandbox. `None` for guests
    /// that are not sandboxes.
    #[serde(default)]
    pub template: Option<String>,
    /// Environment of every process, in addition to the template's.
    pub env: BTreeMap<String, String>,
    /// Access token that clients must send to its agent. `None` if the agent answers every client.
    #[serde(default)]
    pub access_token: Option<String>,
    /// True for a rollback to an earlier state, false for a new or resumed sandbox.
    pub rewound: bool,
    /// Egress rules.
    #[serde(default)]
    pub network: NetworkRules,
    /// Certificate authorities and proxy of its network.
    #[serde(default)]
    pub site: SiteSettings,
}

/// Handle of a kept guest, opaque to the sandbox manager and stored unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GuestHandle(pub String);

/// Guest whose agent waits for an identity. Dropping it ends the guest.
#[async_trait]
pub trait UnassignedGuest: Send {
    /// Returns true if it still waits.
    fn is_waiting(&self) -> bool;

    /// Uses the guest once under an identity that is revoked afterwards, so that its first real use
    /// is fast. On return the guest waits for an identity as before. `site` are the settings under
    /// which its snapshot was taken.
    async fn rehearse(&mut self, _site: &SiteSettings) -> Result<(), EngineError> {
        Ok(())
    }

    /// Assigns the identity; returns when it is in effect.
    async fn assign_identity(
        self: Box<Self>,
        sandbox_identity: &SandboxIdentity,
    ) -> Result<Arc<dyn Guest>, EngineError>;
}

/// Called by a rollback before the guest's state is lost. Returns false to cancel the rollback.
pub type RollbackCommit<'a> = dyn FnMut() -> bool + Send + 'a;

/// Running guest. Dropping it ends the guest, unless it is kept: then dropping it only releases it.
#[async_trait]
pub trait Guest: Send + Sync {
    /// Name of the engine that isolates it.
    fn engine(&self) -> &'static str;

    /// Keeps the guest running beyond this process. Called once per guest, not again after an
    /// adoption.
    async fn keep(&self) -> Result<GuestHandle, EngineError>;

    /// Returns the current handle of a kept guest; a rollback in place changes the handle.
    async fn handle(&self) -> Result<GuestHandle, EngineError> {
        Err(EngineError::Unsupported {
            engine: self.engine(),
            what: "renew a guest's handle",
            instead: None,
        })
    }

    /// Takes snapshot `id`; `parent` is the guest's latest snapshot. Afterwards the new snapshot is
    /// either complete or does not exist. A snapshot larger than `max_bytes`
    /// ([`SnapshotFiles::size`](crate::SnapshotFiles::size)) is rejected
    /// ([`EngineError::SnapshotTooLarge`]). `notice` is sent when the snapshot is captured; from
    /// then on it is completed even if this process ends
    /// ([`KeptGuest::captured`](crate::KeptGuest::captured)). An engine that does not capture
    /// snapshots drops `notice`.
    async fn take_snapshot(
        &self,
        id: &str,
        parent: Option<&str>,
        then: AfterSnapshot,
        max_bytes: Option<u64>,
        notice: Option<CaptureNotice>,
    ) -> Result<SnapshotTimes, EngineError>;

    /// Completes the snapshot with which the guest was adopted
    /// ([`KeptGuest::captured`](crate::KeptGuest::captured)).
    async fn finish_captured(&self) -> Result<SnapshotTimes, EngineError> {
        Err(EngineError::Unsupported {
            engine: self.engine(),
            what: "capture a snapshot",
            instead: None,
        })
    }

    /// Rolls the guest back to snapshot `id` of the same engine in place: process, limits and
    /// network slot stay. Returns when `identity` is in effect. `commit` is called before any state
    /// is lost; if it returns false, the guest stays unchanged.
    async fn roll_back(
        &self,
        _id: &str,
        _identity: &SandboxIdentity,
        _commit: &mut RollbackCommit<'_>,
    ) -> Result<(), RollbackFailure> {
        Err(RollbackFailure::Refused {
            reason: format!("the engine {} does not roll back in place", self.engine()),
        })
    }

    /// Closes the lower of two layers that were folded into one
    /// ([`SnapshotFiles::prepare_fold`](crate::SnapshotFiles::prepare_fold)), whose disk space is
    /// not free until then. Does not wait.
    fn fold_layers(&self, _layers: &FoldedLayers) {}

    /// Returns boot mode and durations.
    fn report(&self) -> BootReport;

    /// Returns the isolating process, if there is one.
    fn pid(&self) -> Option<u32>;

    /// Returns the resource usage, read without waking an idle guest. `None` if unknown.
    fn usage(&self) -> Option<GuestUsage> {
        None
    }

    /// Returns the number of exits from the guest to the host so far, if known.
    async fn exits(&self) -> Option<u64> {
        None
    }

    /// Opens a stream to `port` in the guest. A rejected connection reads as closed.
    async fn connect(&self, port: u32) -> io::Result<UnixStream>;

    /// Connects to TCP `port` of the guest over its network interface. The connection ends with the
    /// guest. `None` if no process accepts the connection in time, or if the guest has no network
    /// interface; the agent may still reach the port from inside.
    async fn connect_tcp(&self, _port: u16) -> Option<GuestStream> {
        None
    }

    /// Uses the guest once, so that the first use of guests restored from its next snapshot is
    /// fast. Failures are not reported.
    async fn rehearse(&self) {}

    /// Replaces its egress rules, also for existing connections.
    async fn set_network(&self, _rules: &NetworkRules) -> Result<(), EngineError> {
        Ok(())
    }

    /// Returns the connection log, which stays readable after the guest has ended. `None` if the
    /// guest has no network.
    fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        None
    }

    /// Waits until the guest has ended; returns the reason.
    async fn ended(&self) -> ExitReason;

    /// Returns the last console output, without control characters.
    fn console_tail(&self) -> String;

    /// Returns the host's failure to read or write the guest's disk, if one occurred: programs in
    /// the guest saw I/O errors.
    fn disk_failure(&self) -> Option<String> {
        None
    }

    /// Kills the guest; returns when it has released everything. May be called twice.
    async fn stop(&self);

    /// Kills the guest; returns when it no longer runs. Its process and network may exist until
    /// [`Self::stop`] returns, which must be called as well.
    async fn halt(&self) {
        self.stop().await;
    }
}
