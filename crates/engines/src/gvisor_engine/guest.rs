//! Guests of the gVisor engine, before and after their identity is assigned, and the handle by
//! which the next daemon adopts a guest.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. The *sentry* is gVisor's kernel in user space, one process per
//! sandbox. A *slot* is a network namespace with its devices and rules. The *journal* is the
//! database of the daemon with the records of sandboxes and snapshots.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

use super::operation_error;
use crate::agent_identity::identity;
use crate::guest_nic::GuestNic;
use crate::host::PreparedTemplate;
use async_trait::async_trait;
use jiffy_engine_api::{
    AfterSnapshot, BootReport, ConnectionLog, EngineError, ExitReason, GVISOR, Guest, GuestHandle,
    GuestUsage, NetworkRules, SandboxIdentity, SnapshotRequest, SnapshotTimes, UnassignedGuest,
    steps,
};
use jiffy_gvisor_engine::{AdoptSpec, Sandbox, SnapshotStore, UnassignedSandbox};
use jiffy_network::SlotLease;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;
use tokio::net::UnixStream;

/// Contents of a [`GuestHandle`].
#[derive(Serialize, Deserialize)]
pub(super) struct GvisorHandle {
    /// Always [`GVISOR`].
    pub(super) engine: String,
    /// Process and files of the sandbox. The serialized name is the earlier name of this field, so
    /// that handles of earlier versions can be read.
    #[serde(rename = "estate")]
    pub(super) adopt_spec: AdoptSpec,
    /// Number of the sandbox's network slot.
    pub(super) slot: Option<u32>,
}

impl GvisorHandle {
    /// Parses the handle in the journal.
    pub(super) fn read(handle: &GuestHandle) -> Result<Self, EngineError> {
        serde_json::from_str(&handle.0).map_err(|e| {
            EngineError::failed(format!(
                "the handle was written by another version of jiffy: {e}"
            ))
        })
    }
}

/// Terminates a sandbox of an earlier daemon on a host where gVisor cannot be used: the daemon
/// could not communicate with the sandbox. Returns whether the sandbox was running.
pub(super) fn end_unreachable(handle: &GuestHandle) -> bool {
    GvisorHandle::read(handle).is_ok_and(|handle| handle.adopt_spec.end())
}

/// Sandbox without an identity: the agent has sent its greeting.
pub(super) struct UnassignedGvisorGuest {
    pub(super) sandbox: UnassignedSandbox,
    pub(super) store: SnapshotStore,
    pub(super) prepared: Arc<PreparedTemplate>,
    pub(super) lease: Option<SlotLease>,
}

/// Running sandbox.
pub(super) struct GvisorGuest {
    pub(super) sandbox: Sandbox,
    pub(super) store: SnapshotStore,
    /// Prevents the removal of the images while the sandbox runs.
    pub(super) _prepared: Option<Arc<PreparedTemplate>>,
    pub(super) nic: GuestNic,
}

impl GvisorGuest {
    pub(super) fn new(
        sandbox: Sandbox,
        store: SnapshotStore,
        prepared: Option<Arc<PreparedTemplate>>,
        lease: Option<SlotLease>,
    ) -> Self {
        Self {
            sandbox,
            store,
            _prepared: prepared,
            nic: GuestNic::new(lease),
        }
    }
}

impl Drop for GvisorGuest {
    fn drop(&mut self) {
        // A sandbox that continues to run without this daemon also retains its slot.
        if self.sandbox.has_ended() {
            self.nic.release();
        }
    }
}

#[async_trait]
impl UnassignedGuest for UnassignedGvisorGuest {
    fn is_waiting(&self) -> bool {
        self.sandbox.is_waiting()
    }

    async fn assign_identity(
        self: Box<Self>,
        sandbox_identity: &SandboxIdentity,
    ) -> Result<Arc<dyn Guest>, EngineError> {
        let Self {
            sandbox,
            store,
            prepared,
            lease,
        } = *self;
        let defaults = &prepared.template().manifest.defaults;
        let identity = identity(sandbox_identity, defaults).map_err(EngineError::failed)?;
        if let Some(lease) = &lease {
            let _step = steps::begin("network_rules");
            let ruled = lease.replace(&sandbox_identity.network).await;
            ruled.map_err(EngineError::failed)?;
        }
        let step = steps::begin("identity");
        let sandbox = sandbox.assign_identity(&identity).await;
        drop(step);
        let sandbox = sandbox.map_err(EngineError::failed)?;
        // The slot is opened last: by now the agent has closed the connections that a clone
        // inherited from its parent.
        if let Some(lease) = &lease {
            lease.open().map_err(EngineError::failed)?;
        }
        let prepared = Some(prepared);
        Ok(Arc::new(GvisorGuest::new(sandbox, store, prepared, lease)))
    }
}

#[async_trait]
impl Guest for GvisorGuest {
    fn engine(&self) -> &'static str {
        GVISOR
    }

    async fn detach(&self) -> Result<GuestHandle, EngineError> {
        self.sandbox.detach().await.map_err(EngineError::failed)?;
        let handle = GvisorHandle {
            engine: GVISOR.to_owned(),
            adopt_spec: self.sandbox.adopt_spec(),
            slot: self.nic.detach(),
        };
        let handle = serde_json::to_string(&handle).map_err(EngineError::failed)?;
        Ok(GuestHandle(handle))
    }

    async fn take_snapshot(
        &self,
        request: SnapshotRequest<'_>,
    ) -> Result<SnapshotTimes, EngineError> {
        if !request.content.is_full() {
            return Err(EngineError::Unsupported {
                engine: GVISOR,
                what: "store the disk without the memory, because a checkpoint contains both",
                instead: Some("a pause or snapshot with memory, or the engine microvm"),
            });
        }
        // A gVisor snapshot is a complete copy, so the parent is not used. gVisor cannot freeze the
        // memory and write it later, so the notice about frozen memory (`request.notice`) is never
        // sent.
        let resume = request.then == AfterSnapshot::Resume;
        let (id, max_bytes) = (request.id, request.max_bytes);
        let taken = self.sandbox.snapshot(&self.store, id, resume, max_bytes);
        let taken = taken.await;
        let (stopped_us, total_us) = taken.map_err(|e| operation_error(e, &self.sandbox))?;
        Ok(SnapshotTimes {
            stopped_us,
            total_us,
        })
    }

    fn report(&self) -> BootReport {
        self.sandbox.report()
    }

    fn pid(&self) -> Option<u32> {
        Some(self.sandbox.pid())
    }

    fn usage(&self) -> Option<GuestUsage> {
        let usage = self.sandbox.usage()?;
        Some(GuestUsage {
            // The sentry does not count network traffic; the slot does.
            net_bytes: self.nic.traffic(),
            ..usage
        })
    }

    async fn connect(&self, port: u32) -> io::Result<UnixStream> {
        self.sandbox.connect(port).await.map_err(io::Error::other)
    }

    async fn set_network(&self, rules: &NetworkRules) -> Result<(), EngineError> {
        self.nic.set_rules(rules).await
    }

    fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        self.nic.connections()
    }

    async fn ended(&self) -> ExitReason {
        self.sandbox.ended().await
    }

    fn console_tail(&self) -> String {
        self.sandbox.console_tail()
    }

    async fn stop(&self) {
        self.sandbox.stop().await;
        self.nic.release();
    }

    async fn halt(&self) {
        self.sandbox.halt().await;
    }
}
