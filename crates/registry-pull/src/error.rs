//! [`PullError`]: errors of pulling an image from a registry.
//!
//! The *puller* is the confined process that downloads images from registries.
//!
//! A *slot* is a network namespace with its devices and rules.

use serde::{Deserialize, Serialize};
use std::io;

/// Failure reported by a puller. The texts are bounded and contain no control characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum PullFault {
    /// The image, manifest or blob does not exist.
    #[error("not found")]
    NotFound,
    /// The credentials are missing or wrong.
    #[error("not authorized")]
    Unauthorized,
    /// The registry limits the rate of requests.
    #[error("too many requests")]
    RateLimit,
    /// The registry responded with another error status.
    #[error("status {0}: {1}")]
    Status(u16, String),
    /// The connection failed, or the peer does not support TLS or HTTP.
    #[error("{0}")]
    Unreachable(String),
    /// A redirect or token realm is not allowed.
    #[error("{0}")]
    Refused(String),
    /// The response exceeds its maximum length.
    #[error("longer than {0} bytes")]
    TooLong(u64),
    /// The connection was closed during a response.
    #[error("the connection was closed early: {0}")]
    Broken(String),
    /// The puller could not confine itself.
    #[error("cannot confine the puller: {0}")]
    Confinement(String),
}

impl PullFault {
    /// Returns text for display: one line of at most 300 characters.
    pub(crate) fn text(text: &str) -> String {
        let shown = text.chars().map(|c| if c.is_control() { ' ' } else { c });
        shown.take(300).collect()
    }

    /// Bounds the texts, because the puller is not trusted.
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
    #[error("cannot start the puller process: {0}")]
    Start(io::Error),
    /// The import was cancelled.
    #[error("the import was cancelled")]
    Cancelled,
    /// No network slot is available, and the host's owner does not allow the registry.
    #[error(
        "this host has no network slots for pulls on behalf of API keys, and its owner has not allowed {0} with --registry-allow"
    )]
    NoNetwork(String),
    /// The pull timed out, or its rate was too low.
    #[error("{0}")]
    Slow(String),
    /// The puller reported a failure.
    #[error("{0}")]
    Fault(#[from] PullFault),
    /// The puller process exited, because of a resource limit or an error.
    #[error("the puller process exited: {0}")]
    Died(String),
    /// The receiver of the data failed.
    #[error("cannot write the downloaded data: {0}")]
    Sink(io::Error),
}
