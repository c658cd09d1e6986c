//! How a sandbox ended, other than because it was told to.

use serde::{Deserialize, Serialize};

/// Why a sandbox is gone. The console is the guest's last output, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "end", rename_all = "snake_case")]
pub enum ExitReason {
    /// It was told to end.
    #[error("the sandbox was stopped")]
    Requested,
    /// The guest rebooted or shut down.
    #[error("the guest shut itself down")]
    GuestReset,
    /// The guest kernel panicked.
    #[error("the guest kernel panicked: {message}")]
    GuestPanic {
        /// The kernel's own words.
        message: String,
    },
    /// The guest kernel had no memory left for anything it could kill.
    #[error("the guest ran out of memory: {message}; give it more with --memory")]
    GuestOutOfMemory {
        /// The kernel's own words.
        message: String,
    },
    /// The guest did what no virtual machine can go on from.
    #[error("the guest broke its machine: {reason}")]
    GuestFault {
        /// What it did.
        reason: String,
    },
    /// The VMM process died.
    #[error("the VMM process of the sandbox was killed ({status}); the sandbox is lost")]
    VmmDied {
        /// How, as the kernel tells it.
        status: String,
    },
    /// The host refused something.
    #[error("the host could not run the sandbox: {reason}")]
    HostError {
        /// What, on what.
        reason: String,
    },
}
