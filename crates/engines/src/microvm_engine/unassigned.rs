//! MicroVMs before they have an identity.

use super::guest::{MicroVmGuest, SocketDirectory};
use crate::agent_identity::identity;
use crate::guest_nic::GuestNic;
use crate::host::PreparedTemplate;
use crate::rehearsal::{self, rehearse};
use jiffy_engine_api::{EngineError, SandboxIdentity, UnassignedGuest};
use jiffy_microvm_engine::{BootError, BootSpec, MicroVm, UnassignedMicroVm};
use jiffy_network::SlotLease;
use jiffy_proto::agent::SiteSettings;
use parking_lot::Mutex;
use std::sync::Arc;

pub(super) fn boot_error(error: BootError) -> EngineError {
    match error.console() {
        Some(console) => EngineError::Boot {
            reason: error.to_string(),
            console: console.to_owned(),
        },
        None => EngineError::failed(error),
    }
}

/// A guest on its way.
pub struct UnassignedMicroVmGuest {
    pub(super) coming: BootStage,
    pub(super) prepared: Arc<PreparedTemplate>,
    pub(super) socket_directory: SocketDirectory,
    pub(super) lease: Option<SlotLease>,
}

pub(super) enum BootStage {
    /// Restored, and waiting.
    Restored(Box<UnassignedMicroVm>),
    /// To be booted when it is known who it is.
    Bootable(Box<BootSpec>),
}

impl UnassignedGuest for UnassignedMicroVmGuest {
    type Guest = MicroVmGuest;

    fn is_waiting(&self) -> bool {
        match &self.coming {
            BootStage::Restored(waiting) => waiting.is_waiting(),
            BootStage::Bootable(_) => true,
        }
    }

    async fn rehearse(mut self, site: &SiteSettings) -> Result<Self, EngineError> {
        let BootStage::Restored(waiting) = &mut self.coming else {
            return Ok(self);
        };
        let defaults = &self.prepared.template().manifest.defaults;
        let identity =
            identity(&rehearsal::sandbox_identity(site), defaults).map_err(EngineError::failed)?;
        // Its network stays closed until it is welcomed.
        rehearse(waiting.rehearse(identity).await.map_err(boot_error)?).await;
        waiting.wait_again().await.map_err(boot_error)?;
        Ok(self)
    }

    async fn assign_identity(
        self,
        sandbox_identity: &SandboxIdentity,
    ) -> Result<MicroVmGuest, EngineError> {
        let Self {
            coming,
            prepared,
            socket_directory,
            lease,
        } = self;
        let defaults = &prepared.template().manifest.defaults;
        let identity = identity(sandbox_identity, defaults).map_err(EngineError::failed)?;
        if let Some(lease) = &lease {
            let ruled = lease.replace(&sandbox_identity.network).await;
            ruled.map_err(EngineError::failed)?;
        }
        let vm = match coming {
            BootStage::Restored(waiting) => waiting.assign_identity(identity.clone()).await,
            BootStage::Bootable(mut spec) => {
                spec.identity = identity.clone();
                MicroVm::boot(*spec).await
            }
        };
        let vm = vm.map_err(boot_error)?;
        // Only now: a clone has none of its parent's connections any more.
        if let Some(lease) = &lease {
            lease.open().map_err(EngineError::failed)?;
        }
        Ok(MicroVmGuest {
            vm,
            image: prepared.image_name().to_owned(),
            identity: Mutex::new(identity),
            socket_directory,
            nic: GuestNic::new(lease),
        })
    }
}
