//! Reasons that a sandbox ended.

use serde::{Deserialize, Serialize};

/// Reason that a sandbox ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "end", rename_all = "snake_case")]
pub enum ExitReason {
    /// A user stopped it.
    #[error("the sandbox was stopped")]
    Requested,
    /// The guest rebooted or shut down.
    #[error("the guest shut itself down")]
    GuestReset,
    /// The guest kernel panicked.
    #[error("the guest kernel panicked: {message}")]
    GuestPanic {
        /// Message of the guest kernel.
        message: String,
    },
    /// The guest kernel ran out of memory with no process left to kill.
    #[error("the guest ran out of memory: {message}; give it more with --memory")]
    GuestOutOfMemory {
        /// Message of the guest kernel.
        message: String,
    },
    /// The guest did something that no virtual machine can continue after.
    #[error("the guest broke its machine: {reason}")]
    GuestFault {
        /// Action of the guest.
        reason: String,
    },
    /// The VMM process died.
    #[error("the VMM process of the sandbox was killed ({status}); the sandbox is lost")]
    VmmDied {
        /// Exit status from the kernel.
        status: String,
    },
    /// Memory of the guest did not arrive from the store in time. The snapshot that it was restored
    /// from is as it was.
    #[error("the host could not run the sandbox: {reason}")]
    MissingMemory {
        /// Time that was waited, and the last failure.
        reason: String,
    },
    /// The host refused an operation.
    #[error("the host could not run the sandbox: {reason}")]
    HostError {
        /// Operation and its object.
        reason: String,
    },
}
