//! Errors of the gVisor engine.

use jiffy_agent_client::GreetingError;
use jiffy_installation::{Component, Package};
use jiffy_proto::channel::ChannelError;
use std::io;
use std::path::{Path, PathBuf};

/// Why gVisor did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum GvisorError {
    /// The helper program could not be started.
    #[error(
        "cannot start {}: {source}; {}, or name it in JIFFY_GVISOR",
        path.display(),
        Package::current().remedy(Component::Gvisor)
    )]
    Spawn {
        /// Path of the program.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The helper program ended in the middle of it.
    #[error("jiffy-gvisor ended while it was asked to {0}; try again")]
    Gone(&'static str),
    /// The socket to the helper program failed.
    #[error(transparent)]
    Control(#[from] ChannelError),
    /// A snapshot has more bytes than it may.
    #[error("the snapshot has {needed} bytes, more than the {most} that it may have")]
    TooLarge {
        /// Bytes it has.
        needed: u64,
        /// Bytes it may have.
        most: u64,
    },
    /// gVisor said no.
    #[error("gVisor could not {what}: {reason}")]
    Refused {
        /// Request that it was sent.
        what: &'static str,
        /// Its own words.
        reason: String,
    },
    /// A file.
    #[error("{}: {source}", path.display())]
    File {
        /// Path of the file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A snapshot that cannot be used.
    #[error("snapshot {id} {reason}")]
    Snapshot {
        /// Id of the snapshot.
        id: String,
        /// Description of the problem.
        reason: String,
    },
    /// The agent misbehaved.
    #[error("{source}{}", last_words(console))]
    Greeting {
        /// Error of the agent's hello.
        source: GreetingError,
        /// The guest's last output.
        console: String,
    },
    /// The agent did not answer in time.
    #[error(
        "the guest agent did not answer within {limit_s} s{}",
        last_words(console)
    )]
    Timeout {
        /// Limit, in seconds.
        limit_s: u64,
        /// The guest's last output.
        console: String,
    },
    /// The process is gone.
    #[error("the sandbox is gone: {0}")]
    Process(io::Error),
}

impl GvisorError {
    pub(crate) fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }
}

fn last_words(console: &str) -> String {
    match console.trim() {
        "" => String::new(),
        words => format!("; its last words: {words}"),
    }
}
