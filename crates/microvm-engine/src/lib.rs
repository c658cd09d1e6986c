//! Isolation engine `microvm`: starts and controls one `jiffy-vmm` process per sandbox.
//!
//! [`MicroVm::boot`] returns when the agent of the new sandbox has answered. [`Connector::connect`]
//! opens streams to the guest.
//!
//! Dropping a [`MicroVm`], or the exit of this process, terminates the guest and leaves no
//! resources behind: the VMM only holds descriptors, and exits when its control socket is closed. A
//! detached guest ([`MicroVm::detach`]) continues to run until another process adopts it
//! ([`MicroVm::adopt`]).

mod boot_error;
mod boot_steps;
mod control_path;
mod control_socket;
mod exit_reason;
mod greeting_task;
pub mod host_kvm;
mod jail_namespaces;
mod snapshot_context;
mod spare_vmms;
mod spec;
mod vm;
mod vmm;
mod vmm_driver;
mod vmm_launcher;
mod vmm_limits;
mod vmm_process;

pub use boot_error::BootError;
pub use jail_namespaces::JailError;
pub use jiffy_confinement::{CgroupError, Cgroups};
pub use snapshot_context::{SaveError, SnapshotSpec, WorkingSet};
pub use spec::{BootDisk, BootSpec, ModulesImage, NetSpec};
pub use vm::adopt::{AdoptError, AdoptSpec, CapturedSpec, end_unadopted};
pub use vm::restore::{FirstUsePages, LazyMemory, MemoryPolicy, RestoreSpec};
pub use vm::rollback::{RollbackError, RollbackSpec};
pub use vm::unassigned::UnassignedMicroVm;
pub use vm::{ConnectError, Connector, MicroVm};
pub use vmm::Vmm;
