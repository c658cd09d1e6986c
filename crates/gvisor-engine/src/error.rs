//! [`GvisorError`]: errors of the gVisor engine and of its helper program.
//!
//! The *helper* is the process `jiffy-gvisor` that starts and drives the sandboxes of a daemon. The
//! *sentry* is gVisor's kernel in user space, one process per sandbox. The *greeting* is the first
//! message of the agent, which then receives the identity of its sandbox.

use jiffy_agent_client::GreetingError;
use jiffy_installation::{Component, Package};
use jiffy_proto::channel::ChannelError;
use std::io;
use std::path::{Path, PathBuf};

/// Error of an operation of gVisor.
#[derive(Debug, thiserror::Error)]
pub enum GvisorError {
    /// The helper program could not be started.
    #[error(
        "cannot start {}: {source}; {}, or set JIFFY_GVISOR to its path",
        path.display(),
        Package::current().remedy(Component::Gvisor)
    )]
    Spawn {
        /// Path of the program.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The helper program exited during the request.
    #[error("jiffy-gvisor exited before it could {0}; try again")]
    Gone(&'static str),
    /// The socket to the helper program failed.
    #[error(transparent)]
    Control(#[from] ChannelError),
    /// The snapshot exceeds its size limit.
    #[error("the snapshot has {needed} bytes, but at most {most} are allowed")]
    TooLarge {
        /// Size of the snapshot, in bytes.
        needed: u64,
        /// Maximum size, in bytes.
        most: u64,
    },
    /// gVisor reported an error.
    #[error("gVisor cannot {what}: {reason}")]
    Refused {
        /// Request that failed.
        what: &'static str,
        /// Message of gVisor.
        reason: String,
    },
    /// A file operation failed.
    #[error("{}: {source}", path.display())]
    File {
        /// Path of the file or directory.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The snapshot cannot be used.
    #[error("snapshot {id} {reason}")]
    Snapshot {
        /// Id of the snapshot.
        id: String,
        /// Description of the problem.
        reason: String,
    },
    /// The agent's greeting is invalid.
    #[error("{source}{}", console_suffix(console))]
    Greeting {
        /// Error of the greeting.
        source: GreetingError,
        /// End of the guest's console output.
        console: String,
    },
    /// The agent did not answer in time.
    #[error(
        "the guest agent did not answer within {limit_s} s{}",
        console_suffix(console)
    )]
    Timeout {
        /// Timeout, in seconds.
        limit_s: u64,
        /// End of the guest's console output.
        console: String,
    },
    /// The host could not create the task or the descriptors of an operation.
    #[error("cannot start the operation on this host: {0}")]
    Host(io::Error),
    /// The sentry process does not exist or exited.
    #[error("the process of the sandbox does not exist: {0}")]
    Process(io::Error),
}

impl GvisorError {
    /// Returns a conversion of I/O errors on `path` for `map_err`.
    pub(crate) fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }
}

/// Returns the end of an error message: the console output, if there is any.
fn console_suffix(console: &str) -> String {
    match console.trim() {
        "" => String::new(),
        output => format!("; end of its console output: {output}"),
    }
}
