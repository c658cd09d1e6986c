//! Sandboxes on gVisor: a kernel in user space instead of a virtual machine, for hosts without KVM.
//!
//! Each sandbox is one process of gVisor's (the *sentry*) as a user of its own and without rights.
//! All of them are made by one helper program, `jiffy-gvisor`, which links gVisor's own runtime,
//! and is asked over a socket: a call of the runtime's command line would spend 12 to 15 ms on its
//! start.

mod error;
mod helper;
mod sandbox;
mod sentry_process;
mod snapshot_store;

pub use error::GvisorError;
pub use helper::Helper;
pub use sandbox::{AdoptSpec, BootSpec, RestoreSpec, Sandbox, UnassignedSandbox};
pub use snapshot_store::{GvisorManifest, SnapshotStore};
