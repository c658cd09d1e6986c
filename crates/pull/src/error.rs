//! Errors of pulling.

use serde::{Deserialize, Serialize};
use std::io;

/// Failure that a puller reports. Texts are bounded and without control characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Fault {
    /// The registry has no such thing.
    #[error("not found")]
    NotFound,
    /// The registry wants other credentials.
    #[error("not authorized")]
    Unauthorized,
    /// The registry wants fewer requests.
    #[error("too many requests")]
    RateLimit,
    /// The registry answers with another status.
    #[error("status {0}: {1}")]
    Status(u16, String),
    /// No connection, no TLS, or no HTTP.
    #[error("{0}")]
    Unreachable(String),
    /// Redirect or token realm that is not followed.
    #[error("{0}")]
    Refused(String),
    /// The answer is longer than the bound.
    #[error("longer than {0} bytes")]
    TooLong(u64),
    /// The connection ended in the middle of an answer.
    #[error("the connection broke off: {0}")]
    Broken(String),
    /// The puller could not confine itself.
    #[error("the puller cannot be confined: {0}")]
    Confinement(String),
}

impl Fault {
    /// A text as it may be shown: one line of at most 300 characters.
    pub(crate) fn text(text: &str) -> String {
        let shown = text.chars().map(|c| if c.is_control() { ' ' } else { c });
        shown.take(300).collect()
    }

    /// Bounds the text, whatever process it comes from.
    pub(crate) fn bounded(self) -> Self {
        match self {
            Self::Status(code, text) => Self::Status(code, Self::text(&text)),
            Self::Unreachable(text) => Self::Unreachable(Self::text(&text)),
            Self::Refused(text) => Self::Refused(Self::text(&text)),
            Self::Broken(text) => Self::Broken(Self::text(&text)),
            Self::Confinement(text) => Self::Confinement(Self::text(&text)),
            other => other,
        }
    }
}

/// Failure of a pull.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The puller process could not be started.
    #[error("cannot start the process that asks registries: {0}")]
    Start(io::Error),
    /// The import was cancelled.
    #[error("the import was cancelled")]
    Cancelled,
    /// No network slot can be had, and the registry is not named by the host's owner.
    #[error(
        "this host has no network for images of keys, and its owner has not named {0} with --registry-allow"
    )]
    NoNetwork(String),
    /// Nothing arrived for too long, or too little.
    #[error("{0}")]
    Slow(String),
    /// The puller reports a failure.
    #[error("{0}")]
    Fault(#[from] Fault),
    /// The puller ended by itself: it passed a limit of the kernel, or has an error.
    #[error("the process that asks registries ended: {0}")]
    Died(String),
    /// The receiver of the bytes failed.
    #[error("cannot write what was downloaded: {0}")]
    Sink(io::Error),
}
