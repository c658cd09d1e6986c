//! Errors of the network component.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use std::io;

/// Error while creating or changing a network.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The machine or the user does not meet a requirement.
    #[error("{0}")]
    Unable(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    Host {
        /// The operation.
        what: String,
        /// The cause.
        source: io::Error,
    },
    /// A program failed. The error has the first line of its output.
    #[error("{program} failed: {message}")]
    Program {
        /// Name of the program.
        program: &'static str,
        /// The first line of its output.
        message: String,
    },
    /// Rules that cannot be enforced.
    #[error(transparent)]
    Rules(#[from] crate::RulesError),
    /// No range of addresses is free.
    #[error(
        "every candidate address range for sandboxes overlaps with a route of this host: choose a range with --network-range"
    )]
    NoRange,
    /// The requested range overlaps with an existing route.
    #[error(
        "the network range {range} overlaps with this host's route to {with}: choose another range"
    )]
    RangeTaken {
        /// The requested range.
        range: String,
        /// Destination of the overlapping route.
        with: String,
    },
    /// All slots are in use.
    #[error("all {0} network slots of this host are in use (see --network-slots)")]
    Full(u32),
}

impl NetError {
    /// Returns a conversion of I/O errors for `map_err`. `what` describes the failed operation.
    pub(crate) fn host(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Host { what, source }
    }
}
