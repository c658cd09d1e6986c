//! [`UnassignedMicroVmGuest`]: a microVM without an identity.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. A *rehearsal* uses a guest of the warm pool once before it is
//! assigned, so that the pages of its first use are private to it. A *slot* is a network namespace
//! with its devices and rules. Slots are prepared in advance, and each is assigned to one guest. A
//! *warm pool* contains guests that were started in advance.

use super::guest::MicroVmGuest;
use super::shared::Shared;
use crate::agent_identity::identity;
use crate::guest_nic::GuestNic;
use crate::host::PreparedTemplate;
use crate::rehearsal::{self, rehearse};
use async_trait::async_trait;
use jiffy_engine_api::{EngineError, Guest, SandboxIdentity, Startup, UnassignedGuest, steps};
use jiffy_microvm_engine::{BootError, BootSpec, MicroVm, UnassignedMicroVm};
use jiffy_network::SlotLease;
use jiffy_proto::agent::SiteSettings;
use parking_lot::Mutex;
use std::sync::Arc;

/// Converts an error of a boot or restore, together with the console of the guest.
pub(super) fn boot_error(error: BootError) -> EngineError {
    match error.console() {
        Some(console) => EngineError::Boot {
            reason: error.to_string(),
            console: console.to_owned(),
        },
        None => EngineError::failed(error),
    }
}

/// MicroVM that is restored and waits for an identity, or boots once it has an identity.
pub(super) struct UnassignedMicroVmGuest {
    pub(super) stage: BootStage,
    pub(super) prepared: Arc<PreparedTemplate>,
    pub(super) shared: Arc<Shared>,
    /// Lease of the guest's network slot. `None` if guests have no network.
    pub(super) lease: Option<SlotLease>,
}

/// State of an unassigned microVM.
pub(super) enum BootStage {
    /// Restored, waiting for the identity.
    Restored(Box<UnassignedMicroVm>),
    /// Boots when the identity is assigned.
    Bootable(Box<BootSpec>),
}

impl UnassignedMicroVmGuest {
    /// Assigns the identity. Returns when the identity is in effect.
    pub(super) async fn assign(
        self,
        sandbox_identity: &SandboxIdentity,
    ) -> Result<MicroVmGuest, EngineError> {
        let Self {
            stage,
            prepared,
            shared,
            lease,
        } = self;
        let defaults = &prepared.template().manifest.defaults;
        let identity = identity(sandbox_identity, defaults).map_err(EngineError::failed)?;
        // Set the rules while the slot is closed: no packet leaves under the rules of another
        // guest.
        if let Some(lease) = &lease {
            let _step = steps::begin("network_rules");
            let ruled = lease.replace(&sandbox_identity.network).await;
            ruled.map_err(EngineError::failed)?;
        }
        let vm = match stage {
            BootStage::Restored(waiting) => waiting.assign_identity(identity.clone()).await,
            BootStage::Bootable(mut spec) => {
                spec.identity = identity.clone();
                MicroVm::boot(*spec).await
            }
        };
        let vm = vm.map_err(boot_error)?;
        // Open the slot last: by now the agent has closed the connections that a clone inherited
        // from its parent.
        if let Some(lease) = &lease {
            lease.open().map_err(EngineError::failed)?;
        }
        Ok(MicroVmGuest {
            vm,
            image: prepared.image_name().to_owned(),
            identity: Mutex::new(identity),
            shared,
            nic: GuestNic::new(lease),
        })
    }
}

#[async_trait]
impl UnassignedGuest for UnassignedMicroVmGuest {
    fn is_waiting(&self) -> bool {
        match &self.stage {
            BootStage::Restored(waiting) => waiting.is_waiting(),
            BootStage::Bootable(_) => true,
        }
    }

    fn boot_startup(&self) -> Option<Startup> {
        match &self.stage {
            BootStage::Bootable(spec) if spec.disk.is_some() => {
                Some(self.prepared.template().manifest.startup.clone())
            }
            _ => None,
        }
    }

    async fn rehearse(&mut self, site: &SiteSettings) -> Result<(), EngineError> {
        let BootStage::Restored(waiting) = &mut self.stage else {
            return Ok(());
        };
        let defaults = &self.prepared.template().manifest.defaults;
        let identity =
            identity(&rehearsal::sandbox_identity(site), defaults).map_err(EngineError::failed)?;
        // `waiting.rehearse` assigns a temporary identity, and the function `rehearse` runs the
        // commands. The rehearsal runs without a network: only `assign` opens the slot.
        rehearse(waiting.rehearse(identity).await.map_err(boot_error)?).await;
        // The guest waits for its final identity as before the rehearsal.
        waiting.withdraw_identity().await.map_err(boot_error)
    }

    async fn assign_identity(
        self: Box<Self>,
        sandbox_identity: &SandboxIdentity,
    ) -> Result<Arc<dyn Guest>, EngineError> {
        Ok(Arc::new(self.assign(sandbox_identity).await?))
    }
}
