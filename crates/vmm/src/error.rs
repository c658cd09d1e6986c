//! Error of building and running a VM.

use jiffy_proto::vm::StopCause;
use std::fmt::Display;

/// Failure to build a VM, or the reason that it had to end.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The configuration asks for something this VMM does not do.
    #[error("{0}")]
    Config(String),
    /// KVM or the host refused.
    #[error("{what}: {reason}")]
    Host {
        /// Attempted operation.
        what: &'static str,
        /// Answer of the host.
        reason: String,
    },
    /// The snapshot would be larger than its limit.
    #[error("the snapshot would have {needed} bytes, more than the {most} that it may have")]
    SnapshotTooLarge {
        /// Upper bound of its size in bytes.
        needed: u64,
        /// Limit in bytes.
        most: u64,
    },
    /// A part of memory could not be fetched in time.
    #[error("its store did not answer for {seconds} s{reason}")]
    Store {
        /// Time limit.
        seconds: f64,
        /// Last failure in parentheses, after a space; may be empty.
        reason: String,
    },
    /// The guest did something that no VM can continue after.
    #[error("{0}")]
    Guest(String),
}

impl VmmError {
    /// A refusal by the host while doing `what`.
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
