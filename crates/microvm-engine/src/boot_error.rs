//! Errors of booting or restoring a microVM.

use crate::host_kvm::KvmError;
use crate::jail_namespaces::JailError;
use jiffy_agent_client::GreetingError;
use jiffy_confinement::CgroupError;
use jiffy_engine_api::ExitReason;
use jiffy_installation::{Component, Package};
use jiffy_proto::channel::ChannelError;
use jiffy_snapshot::SnapshotError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Timeout of each wait for the agent: for its greeting, or for its confirmation of the identity.
/// During a boot, the wait starts when the VMM has the boot request.
pub(crate) const BOOT_TIMEOUT: Duration = Duration::from_secs(30);

/// Error of booting or restoring a microVM.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The host has no usable KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The VMM program could not be started.
    #[error(
        "cannot start the VMM program {path}: {source}; {}, or set JIFFY_VMM to its path",
        Package::current().remedy(Component::Host)
    )]
    Spawn {
        /// Path of the program.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The VMM could not be confined.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// The VMM could not be limited.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// An operation of the host failed.
    #[error("{what}: {source}")]
    Host {
        /// Failed operation.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The snapshot cannot be used.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The control socket failed.
    #[error(transparent)]
    Control(#[from] ChannelError),
    /// The VM ended before the agent answered.
    #[error("{end}")]
    Ended {
        /// Reason.
        end: ExitReason,
        /// End of the guest's console output.
        console: String,
    },
    /// The agent violated the protocol.
    #[error("{source}")]
    Greeting {
        /// Violation.
        source: GreetingError,
        /// End of the guest's console output.
        console: String,
    },
    /// The agent did not answer in time.
    #[error("the guest agent did not answer within {} s", BOOT_TIMEOUT.as_secs())]
    Timeout {
        /// End of the guest's console output.
        console: String,
    },
}

impl BootError {
    /// Returns the end of the console output. `None` for errors of the host, most of which occur
    /// before the guest starts.
    pub fn console(&self) -> Option<&str> {
        match self {
            Self::Ended { console, .. }
            | Self::Greeting { console, .. }
            | Self::Timeout { console } => Some(console),
            _ => None,
        }
    }
}
