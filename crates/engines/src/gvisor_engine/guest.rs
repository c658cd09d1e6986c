//! Sandboxes on gVisor before and after they have an identity, and handles by which they are
//! adopted.

use crate::agent_identity::identity;
use crate::guest_nic::GuestNic;
use crate::host::PreparedTemplate;
use jiffy_engine_api::{
    BootReport, ConnectionLog, EngineError, ExitReason, GVISOR, Guest, GuestHandle, GuestUsage,
    NetworkRules, SandboxIdentity, UnassignedGuest,
};
use jiffy_gvisor_engine::{AdoptSpec, Sandbox, UnassignedSandbox};
use jiffy_network::SlotLease;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;
use tokio::net::UnixStream;

/// A [`GuestHandle`] in words.
#[derive(Serialize, Deserialize)]
pub(super) struct GvisorHandle {
    /// [`GVISOR`].
    pub(super) engine: String,
    pub(super) estate: AdoptSpec,
    /// Its network slot.
    pub(super) slot: Option<u32>,
}

impl GvisorHandle {
    pub(super) fn read(handle: &GuestHandle) -> Result<Self, EngineError> {
        serde_json::from_str(&handle.0).map_err(|e| {
            EngineError::failed(format!(
                "it was written down by another version of jiffy: {e}"
            ))
        })
    }
}

/// True if a handle is one of this engine's.
pub(crate) fn is_ours(handle: &GuestHandle) -> bool {
    GvisorHandle::read(handle).is_ok_and(|handle| handle.engine == GVISOR)
}

/// Ends a sandbox that ran on, where gVisor cannot be used: nobody could reach it. Whether there
/// was one.
pub(crate) fn end_unreachable(handle: &GuestHandle) -> bool {
    GvisorHandle::read(handle).is_ok_and(|handle| handle.estate.end())
}

/// A sandbox on its way.
pub struct UnassignedGvisorGuest {
    pub(super) coming: UnassignedSandbox,
    pub(super) prepared: Arc<PreparedTemplate>,
    pub(super) lease: Option<SlotLease>,
}

/// A running sandbox.
pub struct GvisorGuest {
    pub(super) sandbox: Sandbox,
    /// As long as it runs, its images stay.
    pub(super) _prepared: Option<Arc<PreparedTemplate>>,
    pub(super) nic: GuestNic,
}

impl GvisorGuest {
    pub(super) fn new(
        sandbox: Sandbox,
        prepared: Option<Arc<PreparedTemplate>>,
        lease: Option<SlotLease>,
    ) -> Self {
        Self {
            sandbox,
            _prepared: prepared,
            nic: GuestNic::new(lease),
        }
    }
}

impl Drop for GvisorGuest {
    fn drop(&mut self) {
        // One that is kept and runs on keeps its slot, too.
        if self.sandbox.has_ended() {
            self.nic.give_up();
        }
    }
}

impl UnassignedGuest for UnassignedGvisorGuest {
    type Guest = GvisorGuest;

    fn is_waiting(&self) -> bool {
        self.coming.is_waiting()
    }

    async fn assign_identity(
        self,
        sandbox_identity: &SandboxIdentity,
    ) -> Result<GvisorGuest, EngineError> {
        let Self {
            coming,
            prepared,
            lease,
        } = self;
        let defaults = &prepared.template().manifest.defaults;
        let identity = identity(sandbox_identity, defaults).map_err(EngineError::failed)?;
        if let Some(lease) = &lease {
            let ruled = lease.replace(&sandbox_identity.network).await;
            ruled.map_err(EngineError::failed)?;
        }
        let sandbox = coming.assign_identity(&identity).await;
        let sandbox = sandbox.map_err(EngineError::failed)?;
        // Only now: a clone has none of its parent's connections any more.
        if let Some(lease) = &lease {
            lease.open().map_err(EngineError::failed)?;
        }
        Ok(GvisorGuest::new(sandbox, Some(prepared), lease))
    }
}

impl Guest for GvisorGuest {
    fn engine(&self) -> &'static str {
        GVISOR
    }

    async fn keep(&self) -> Result<GuestHandle, EngineError> {
        self.sandbox.keep().await.map_err(EngineError::failed)?;
        let handle = GvisorHandle {
            engine: GVISOR.to_owned(),
            estate: self.sandbox.adopt_spec(),
            slot: self.nic.keep(),
        };
        let handle = serde_json::to_string(&handle).map_err(EngineError::failed)?;
        Ok(GuestHandle(handle))
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
        self.nic.give_up();
    }

    async fn halt(&self) {
        self.sandbox.halt().await;
    }
}
