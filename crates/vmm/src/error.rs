//! [`VmmError`]: errors of building and running a VM.

use jiffy_proto::vm::StopCause;
use std::fmt::Display;

/// Error of building a VM, or the reason why a VM had to end.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The configuration is not supported.
    #[error("{0}")]
    Config(String),
    /// An operation of KVM or the host failed.
    #[error("{what}: {reason}")]
    Host {
        /// Failed operation.
        what: &'static str,
        /// Error message.
        reason: String,
    },
    /// The snapshot would be larger than its limit.
    #[error("the snapshot would need {needed} bytes, but at most {limit} are allowed")]
    SnapshotTooLarge {
        /// Upper bound of the snapshot's size, in bytes.
        needed: u64,
        /// Limit, in bytes.
        limit: u64,
    },
    /// Part of the memory was not fetched in time.
    #[error("the store did not answer for {seconds} s{reason}")]
    Store {
        /// Timeout, in seconds.
        seconds: f64,
        /// Last error, in parentheses after a space. May be empty.
        reason: String,
    },
    /// The guest reached a state in which the VM cannot continue.
    #[error("{0}")]
    Guest(String),
}

impl VmmError {
    /// Returns the error of an operation of the host. `what` names the operation.
    pub fn host(what: &'static str, reason: impl Display) -> Self {
        Self::Host {
            what,
            reason: reason.to_string(),
        }
    }
}

impl From<VmmError> for StopCause {
    fn from(error: VmmError) -> Self {
        match error {
            VmmError::Config(reason) => Self::BadConfig { reason },
            VmmError::Host { .. } | VmmError::SnapshotTooLarge { .. } => Self::HostError {
                reason: error.to_string(),
            },
            VmmError::Store { .. } => Self::MissingMemory {
                reason: error.to_string(),
            },
            VmmError::Guest(reason) => Self::GuestFault { reason },
        }
    }
}
