//! Isolation engine `microvm`: spawns and drives one `jiffy-vmm` process per sandbox.
//!
//! [`MicroVm::boot`] returns when the guest agent of that very sandbox has answered; [`Connector::connect`] opens streams to
//! the guest. Dropping a [`MicroVm`], or the death of this process, ends the guest: nothing is left behind, because the
//! VMM holds nothing but descriptors and its control socket is ours.

mod driver;
mod greeting;
pub mod host_kvm;
mod link;
mod restore;
mod saving;
mod spec;
mod verdict;
mod vm;
mod waiting;

pub use greeting::GreetingError;
pub use restore::{MemoryPolicy, RestoreSpec};
pub use saving::{SaveError, SnapshotSpec};
pub use spec::{BootSpec, NetSpec};
pub use vm::{BootError, ConnectError, Connector, MicroVm};
pub use waiting::Waiting;
