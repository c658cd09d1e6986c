//! Errors of the access to heads. The head of a sandbox is the record in the store that decides
//! which host may run it. Most of these errors mean that another host has the sandbox, or has
//! changed its head.
//!
//! To *claim* a sandbox means to become its owner in the head.

use crate::RecordError;
use jiffy_store::host::RemoteError;
use std::fmt::Display;

/// Failure of an operation on the head of a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum HeadError {
    /// The sandbox runs on another host.
    #[error("sandbox {sandbox} runs on host {host}: use it there, or pause it there first")]
    Elsewhere {
        /// Sandbox.
        sandbox: String,
        /// Host.
        host: String,
    },
    /// The sandbox ran on a host that is dead.
    #[error(
        "host {host} of sandbox {sandbox} was lost; wait for its return, or resume the sandbox from \
         its newest stored state: `jiffy resume --from stored {sandbox}`"
    )]
    HostLost {
        /// Sandbox.
        sandbox: String,
        /// Host.
        host: String,
    },
    /// This host must not claim sandboxes now.
    #[error("sandbox {sandbox} cannot be resumed: this host has no contact with the fleet; retry")]
    NoAuthority {
        /// Sandbox.
        sandbox: String,
    },
    /// The sandbox was killed.
    #[error("sandbox {sandbox} was killed")]
    Killed {
        /// Sandbox.
        sandbox: String,
    },
    /// Another host has resumed and paused the sandbox since this host paused it.
    #[error("sandbox {sandbox} has a newer state in the store than on this host")]
    Newer {
        /// Sandbox.
        sandbox: String,
    },
    /// The record could not be read or written.
    #[error("cannot determine which host may run sandbox {sandbox}: {source}")]
    Record {
        /// Sandbox.
        sandbox: String,
        /// Failure.
        source: RecordError,
    },
    /// The keys of the sandbox's tenant could not be read from the store. They encrypt its head.
    #[error(transparent)]
    Store(RemoteError),
    /// The head is invalid.
    #[error("the head of sandbox {sandbox} is damaged: {reason}")]
    Damaged {
        /// Sandbox.
        sandbox: String,
        /// Defect.
        reason: String,
    },
    /// Other hosts changed the head at each attempt.
    #[error("other hosts change sandbox {sandbox} concurrently; try again")]
    Contended {
        /// Sandbox.
        sandbox: String,
    },
}

impl HeadError {
    /// Returns whether another host has taken over the sandbox or killed it.
    pub fn is_moved(&self) -> bool {
        matches!(
            self,
            Self::Elsewhere { .. } | Self::Killed { .. } | Self::Newer { .. }
        )
    }

    /// Returns whether the host of the sandbox is dead.
    pub fn is_host_lost(&self) -> bool {
        matches!(self, Self::HostLost { .. })
    }

    /// Returns whether the same call may succeed later.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Record { source, .. } => source.is_temporary(),
            Self::Store(e) => e.retry_after().is_some(),
            Self::Contended { .. } | Self::NoAuthority { .. } => true,
            _ => false,
        }
    }

    pub(super) fn store(e: RemoteError) -> Self {
        Self::Store(e)
    }

    pub(super) fn damaged(sandbox: &str) -> impl Fn(&dyn Display) -> Self + '_ {
        |reason| Self::Damaged {
            sandbox: sandbox.to_owned(),
            reason: reason.to_string(),
        }
    }

    pub(super) fn record(sandbox: impl Display) -> impl FnOnce(RecordError) -> Self {
        move |source| Self::Record {
            sandbox: sandbox.to_string(),
            source,
        }
    }

    pub(super) fn killed(sandbox: &str) -> Self {
        Self::Killed {
            sandbox: sandbox.to_owned(),
        }
    }

    pub(super) fn newer(sandbox: &str) -> Self {
        Self::Newer {
            sandbox: sandbox.to_owned(),
        }
    }

    pub(super) fn no_authority(sandbox: &str) -> Self {
        Self::NoAuthority {
            sandbox: sandbox.to_owned(),
        }
    }

    pub(super) fn contended(sandbox: &str) -> Self {
        Self::Contended {
            sandbox: sandbox.to_owned(),
        }
    }
}
