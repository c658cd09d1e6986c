//! Errors of pulling.

use serde::{Deserialize, Serialize};
use std::io;

/// Failure reported by a puller. Texts are bounded and without control characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum PullFault {
    /// Unknown image, manifest or blob.
    #[error("not found")]
    NotFound,
    /// Missing or wrong credentials.
    #[error("not authorized")]
    Unauthorized,
    /// Too many requests.
    #[error("too many requests")]
    RateLimit,
    /// Another status.
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

impl PullFault {
    /// A text as it may be shown: one line of at most 300 characters.
    pub(crate) fn text(text: &str) -> String {
        let shown = text.chars().map(|c| if c.is_control() { ' ' } else { c });
        shown.take(300).collect()
    }

    /// Bounds the texts, since the puller is not trusted.
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
    /// No network slot is available, and the host's owner does not allow the registry.
    #[error(
        "this host has no network for images of keys, and its owner has not named {0} with --registry-allow"
    )]
    NoNetwork(String),
    /// Timeout, or too low a rate.
    #[error("{0}")]
    Slow(String),
    /// The puller reports a failure.
    #[error("{0}")]
    Fault(#[from] PullFault),
    /// The puller ended: by a resource limit or an error.
    #[error("the process that asks registries ended: {0}")]
    Died(String),
    /// Error of the receiver of the bytes.
    #[error("cannot write what was downloaded: {0}")]
    Sink(io::Error),
}
