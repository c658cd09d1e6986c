//! [`ExitReason`]: the reason why a guest ended. The engine determines it.

use serde::{Deserialize, Serialize};

/// Reason why a sandbox ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "end", rename_all = "snake_case")]
pub enum ExitReason {
    /// A user stopped the sandbox.
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
    /// The guest kernel ran out of memory with no process left to kill. On gVisor, the sandbox
    /// exceeded the memory limit of its control group.
    #[error("the guest ran out of memory: {message}; give it more with --memory")]
    GuestOutOfMemory {
        /// Message of the guest kernel. On gVisor, a description of the exceeded limit.
        message: String,
    },
    /// The guest left its virtual machine in a state from which it cannot continue.
    #[error("the guest caused a fatal error in its virtual machine: {reason}")]
    GuestFault {
        /// Action of the guest.
        reason: String,
    },
    /// The process that isolates the sandbox (VMM or gVisor sentry) exited unexpectedly.
    #[error("the process that isolates the sandbox was killed ({status}); the sandbox is lost")]
    VmmDied {
        /// Exit status reported by the kernel.
        status: String,
    },
    /// The guest's memory was not fetched from the store in time. The snapshot from which the guest
    /// was restored is unchanged.
    #[error("the host cannot run the sandbox: {reason}")]
    MissingMemory {
        /// Timeout and last error.
        reason: String,
    },
    /// An operation failed on the host.
    #[error("the host cannot run the sandbox: {reason}")]
    HostError {
        /// Failed operation and its object.
        reason: String,
    },
}
