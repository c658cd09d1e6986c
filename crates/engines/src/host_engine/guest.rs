//! Guests of all engines of a host.

use crate::gvisor_engine::{GvisorGuest, UnassignedGvisorGuest};
use crate::microvm_engine::{MicroVmGuest, UnassignedMicroVmGuest};
use jiffy_engine_api::{
    BootReport, ConnectionLog, EngineError, ExitReason, Guest, GuestHandle, GuestStream,
    GuestUsage, NetworkRules, SandboxIdentity, UnassignedGuest,
};
use jiffy_proto::agent::SiteSettings;
use jiffy_proto::snapshot::FoldedLayers;
use std::io;
use std::sync::Arc;
use tokio::net::UnixStream;

/// A guest on its way, of one of the engines.
pub enum UnassignedHostGuest {
    /// A virtual machine.
    MicroVm(Box<UnassignedMicroVmGuest>),
    /// A gVisor sandbox.
    Gvisor(Box<UnassignedGvisorGuest>),
}

/// A running guest of one of the engines.
pub enum HostGuest {
    /// A virtual machine.
    MicroVm(MicroVmGuest),
    /// A gVisor sandbox.
    Gvisor(GvisorGuest),
}

/// Does the same with a guest of whichever engine.
macro_rules! guest {
    ($guest:expr, $name:ident => $work:expr) => {
        match $guest {
            HostGuest::MicroVm($name) => $work,
            HostGuest::Gvisor($name) => $work,
        }
    };
}

impl UnassignedGuest for UnassignedHostGuest {
    type Guest = HostGuest;

    fn is_waiting(&self) -> bool {
        match self {
            Self::MicroVm(unassigned) => unassigned.is_waiting(),
            Self::Gvisor(unassigned) => unassigned.is_waiting(),
        }
    }

    async fn rehearse(self, site: &SiteSettings) -> Result<Self, EngineError> {
        match self {
            Self::MicroVm(unassigned) => {
                let rehearsed = unassigned.rehearse(site).await?;
                Ok(Self::MicroVm(Box::new(rehearsed)))
            }
            // It restores all of its memory at once.
            Self::Gvisor(unassigned) => Ok(Self::Gvisor(unassigned)),
        }
    }

    async fn assign_identity(
        self,
        sandbox_identity: &SandboxIdentity,
    ) -> Result<HostGuest, EngineError> {
        match self {
            Self::MicroVm(unassigned) => Ok(HostGuest::MicroVm(
                unassigned.assign_identity(sandbox_identity).await?,
            )),
            Self::Gvisor(unassigned) => Ok(HostGuest::Gvisor(
                unassigned.assign_identity(sandbox_identity).await?,
            )),
        }
    }
}

impl Guest for HostGuest {
    fn engine(&self) -> &'static str {
        guest!(self, guest => guest.engine())
    }

    async fn keep(&self) -> Result<GuestHandle, EngineError> {
        guest!(self, guest => guest.keep().await)
    }

    async fn handle(&self) -> Result<GuestHandle, EngineError> {
        guest!(self, guest => guest.handle().await)
    }

    fn fold_layers(&self, layers: &FoldedLayers) {
        guest!(self, guest => guest.fold_layers(layers));
    }

    fn report(&self) -> BootReport {
        guest!(self, guest => guest.report())
    }

    fn pid(&self) -> Option<u32> {
        guest!(self, guest => guest.pid())
    }

    fn usage(&self) -> Option<GuestUsage> {
        guest!(self, guest => guest.usage())
    }

    async fn exits(&self) -> Option<u64> {
        guest!(self, guest => guest.exits().await)
    }

    async fn connect(&self, port: u32) -> io::Result<UnixStream> {
        guest!(self, guest => guest.connect(port).await)
    }

    async fn connect_tcp(&self, port: u16) -> Option<GuestStream> {
        guest!(self, guest => guest.connect_tcp(port).await)
    }

    async fn rehearse(&self) {
        guest!(self, guest => guest.rehearse().await)
    }

    async fn set_network(&self, rules: &NetworkRules) -> Result<(), EngineError> {
        guest!(self, guest => guest.set_network(rules).await)
    }

    fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        guest!(self, guest => guest.connections())
    }

    async fn ended(&self) -> ExitReason {
        guest!(self, guest => guest.ended().await)
    }

    fn console_tail(&self) -> String {
        guest!(self, guest => guest.console_tail())
    }

    fn disk_failure(&self) -> Option<String> {
        guest!(self, guest => guest.disk_failure())
    }

    async fn stop(&self) {
        guest!(self, guest => guest.stop().await);
    }

    async fn halt(&self) {
        guest!(self, guest => guest.halt().await);
    }
}
