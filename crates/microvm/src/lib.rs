//! Isolation engine `microvm`: spawns and drives one `jiffy-vmm` process per sandbox.
//!
//! [`MicroVm::boot`] returns when the guest agent of that very sandbox has answered; [`Connector::connect`] opens streams to
//! the guest. Dropping a [`MicroVm`], or the death of this process, ends the guest: nothing is left behind, because the
//! VMM holds nothing but descriptors and its control socket is ours. One that is kept ([`MicroVm::keep`]) runs on instead, and
//! another process adopts it ([`MicroVm::adopt`]).

mod adopt;
mod cgroup;
mod driver;
pub mod host_kvm;
mod jail;
mod link;
mod mark;
mod process;
mod restore;
mod saving;
mod snapshot;
mod spec;
mod verdict;
mod vm;
mod waiting;

pub use adopt::{AdoptError, AdoptSpec, end_others};
pub use cgroup::{CgroupError, Cgroups};
pub use jail::{JailError, Vmm};
pub use restore::{MemoryPolicy, RestoreSpec};
pub use saving::SaveError;
pub use snapshot::SnapshotSpec;
pub use spec::{BootSpec, ModulesImage, NetSpec};
pub use vm::{BootError, ConnectError, Connector, MicroVm};
pub use waiting::Waiting;
