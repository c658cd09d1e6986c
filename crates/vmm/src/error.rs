//! The one error of building and running a VM.

use jiffy_proto::vm::StopCause;
use std::fmt::Display;

/// Why a VM could not be built or had to end.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The configuration asks for something this VMM does not do.
    #[error("{0}")]
    Config(String),
    /// KVM or the host refused.
    #[error("{what}: {reason}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// What the host answered.
        reason: String,
    },
    /// A snapshot would have more bytes than it may.
    #[error("the snapshot would have {needed} bytes, more than the {most} that it may have")]
    SnapshotTooLarge {
        /// Bytes it would have at most.
        needed: u64,
        /// Bytes it may have.
        most: u64,
    },
    /// The guest did something no VM can go on from.
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
            VmmError::Guest(reason) => Self::GuestFault { reason },
        }
    }
}
