//! Guests of an engine, before and after their identity is assigned ([`UnassignedGuest`],
//! [`Guest`]).
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. The *site* is the network in which the sandboxes run. Its
//! settings are certificate authorities and a proxy. A *hook* is an executable in the guest that
//! the agent runs before the state of the guest is stored, and after the guest continues.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A *detached* guest
//! continues to run when the process that started it exits. A snapshot is *captured* when its
//! memory is frozen in a process that survives this one.

use crate::{
    BootReport, ConnectionLog, EngineError, ExitReason, GuestCounters, GuestStream, GuestUsage,
    NetworkRules, RollbackFailure, SnapshotRequest, SnapshotTimes, Startup,
};
use async_trait::async_trait;
use jiffy_proto::agent::SiteSettings;
use jiffy_proto::snapshot::FoldedLayers;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use tokio::net::UnixStream;

/// Identity of a sandbox. Clock and entropy are added when the identity is assigned.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxIdentity {
    /// Sandbox id, which is also the host name.
    pub id: String,
    /// Id of the template as its owner sees it, for programs in the sandbox. `None` for guests that
    /// are not sandboxes.
    #[serde(default)]
    pub template: Option<String>,
    /// Environment variables of every process, in addition to the template's.
    pub env: BTreeMap<String, String>,
    /// Access token that clients must send to the agent. `None` if the agent accepts every client.
    #[serde(default)]
    pub access_token: Option<String>,
    /// True for a rollback to an earlier state, false for a new or resumed sandbox.
    pub rewound: bool,
    /// Egress rules.
    #[serde(default)]
    pub network: NetworkRules,
    /// Certificate authorities and proxy of the site.
    #[serde(default)]
    pub site: SiteSettings,
}

/// Handle of a detached guest. The sandbox manager stores it unchanged and does not interpret it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GuestHandle(pub String);

/// Guest whose agent waits for an identity. Dropping it terminates the guest.
#[async_trait]
pub trait UnassignedGuest: Send {
    /// Returns whether the guest still waits for an identity.
    fn is_waiting(&self) -> bool;

    /// Uses the guest once under a temporary identity, so that its first real use is fast. On
    /// return, the guest waits for an identity again. `site` are the settings under which its
    /// snapshot was taken.
    async fn rehearse(&mut self, _site: &SiteSettings) -> Result<(), EngineError> {
        Ok(())
    }

    /// Returns the startup of a guest that boots from the disk of a snapshot. `None` if the guest
    /// contains the processes of its snapshot, or boots from a template.
    fn boot_startup(&self) -> Option<Startup> {
        None
    }

    /// Assigns the identity. Returns when the identity is in effect.
    async fn assign_identity(
        self: Box<Self>,
        sandbox_identity: &SandboxIdentity,
    ) -> Result<Arc<dyn Guest>, EngineError>;
}

/// Called by a rollback before the guest's state is lost. Returns `false` to cancel the rollback.
pub type RollbackCommit<'a> = dyn FnMut() -> bool + Send + 'a;

/// Running guest. Dropping it terminates the guest, unless the guest is detached.
#[async_trait]
pub trait Guest: Send + Sync {
    /// Returns the name of the guest's engine.
    fn engine(&self) -> &'static str;

    /// Detaches the guest: it continues to run after this process exits. Called once per guest, and
    /// not again after an adoption.
    async fn detach(&self) -> Result<GuestHandle, EngineError>;

    /// Returns the current handle of a detached guest. A rollback in place changes the handle.
    async fn handle(&self) -> Result<GuestHandle, EngineError> {
        Err(EngineError::Unsupported {
            engine: self.engine(),
            what: "renew a guest's handle",
            instead: None,
        })
    }

    /// Takes a snapshot. On return, the new snapshot is either complete or does not exist. An
    /// engine that cannot omit the memory rejects a request for the file system alone.
    async fn take_snapshot(
        &self,
        request: SnapshotRequest<'_>,
    ) -> Result<SnapshotTimes, EngineError>;

    /// Completes the snapshot that was captured before the guest was adopted
    /// ([`DetachedGuest::captured`](crate::DetachedGuest::captured)).
    async fn finish_captured(&self) -> Result<SnapshotTimes, EngineError> {
        Err(EngineError::Unsupported {
            engine: self.engine(),
            what: "capture a snapshot",
            instead: None,
        })
    }

    /// Rolls the guest back to snapshot `id` of the same engine in place: process, limits and
    /// network slot remain. Returns when `identity` is in effect. `commit` is called before any
    /// state is lost. If it returns `false`, the guest remains unchanged.
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

    /// Closes the file of the lower of two snapshot layers after a fold has merged them into one
    /// ([`SnapshotFiles::prepare_fold`](crate::SnapshotFiles::prepare_fold)). The disk space of
    /// that layer is released only when no guest has it open. Does not wait.
    fn fold_layers(&self, _layers: &FoldedLayers) {}

    /// Returns whether the guest may have a directory with hooks. `false` only if its agent has
    /// reported that it has none. Does not wake an idle guest.
    fn may_have_hooks(&self) -> bool {
        true
    }

    /// Returns boot mode and durations of the boot.
    fn report(&self) -> BootReport;

    /// Returns the id of the process that isolates the guest. `None` if there is no such process.
    fn pid(&self) -> Option<u32>;

    /// Returns the resource usage, without waking an idle guest. `None` if unknown.
    fn usage(&self) -> Option<GuestUsage> {
        None
    }

    /// Returns the counters of [`Self::usage`] that operations read, with fewer system calls.
    fn counters(&self) -> Option<GuestCounters> {
        self.usage().map(GuestCounters::from)
    }

    /// Returns the number of exits from the guest to the host so far. `None` if unknown.
    async fn exits(&self) -> Option<u64> {
        None
    }

    /// Opens a stream to `port` in the guest. If the guest rejects the connection, reads return the
    /// end of the stream.
    async fn connect(&self, port: u32) -> io::Result<UnixStream>;

    /// Connects to TCP `port` of the guest over its network interface. The connection is closed
    /// when the guest ends. `None` if no process accepts the connection in time, or if the guest
    /// has no network interface. The agent may still be able to connect to the port from inside the
    /// guest.
    async fn connect_tcp(&self, _port: u16) -> Option<GuestStream> {
        None
    }

    /// Uses the guest once, so that the first use of guests restored from its next snapshot is
    /// fast. Failures are not reported.
    async fn rehearse(&self) {}

    /// Replaces the guest's egress rules, also for existing connections.
    async fn set_network(&self, _rules: &NetworkRules) -> Result<(), EngineError> {
        Ok(())
    }

    /// Returns the connection log, which remains readable after the guest has ended. `None` if the
    /// guest has no network.
    fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        None
    }

    /// Waits until the guest has ended and returns the reason.
    async fn ended(&self) -> ExitReason;

    /// Returns the end of the console output, without control characters.
    fn console_tail(&self) -> String;

    /// Returns the first error of the host while it read or wrote the guest's disk. `None` if no
    /// error occurred. Programs in the guest received an I/O error.
    fn disk_failure(&self) -> Option<String> {
        None
    }

    /// Kills the guest and returns when all of its resources are released. May be called twice.
    async fn stop(&self);

    /// Kills the guest and returns when it no longer runs. Its process and network may exist until
    /// [`Self::stop`] returns, which must be called as well.
    async fn halt(&self) {
        self.stop().await;
    }
}
