//! Sandboxes on gVisor, a kernel in user space, for hosts without KVM.
//!
//! Each sandbox is one gVisor process, the *sentry*, which runs as a user of its own without
//! privileges. One helper program, `jiffy-gvisor`, creates all sentries. It links gVisor's runtime
//! and receives requests over a socket. Starting gVisor's command line program for each request
//! would take 12 to 15 ms.
//!
//! docs/design-gvisor.md explains the design.

mod error;
mod helper;
mod sandbox;
mod sentry_process;
mod snapshot_store;

pub use error::GvisorError;
pub use helper::Helper;
pub use sandbox::{AdoptSpec, BootSpec, RestoreSpec, Sandbox, UnassignedSandbox};
pub use snapshot_store::{GvisorManifest, SnapshotStore};
