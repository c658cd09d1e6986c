//! Errors of networks.

use std::io;

/// Error of making or changing a network.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// This machine or this user lacks a requirement.
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
    /// A program failed.
    #[error("{program} failed: {said}")]
    Program {
        /// Its name.
        program: &'static str,
        /// The first line of its output.
        said: String,
    },
    /// Rules that cannot be enforced.
    #[error(transparent)]
    Rules(#[from] crate::RulesError),
    /// No range of addresses is free.
    #[error(
        "no range of addresses for sandboxes is free beside the routes of this host: name one with --network-range"
    )]
    NoRange,
    /// The requested range is taken.
    #[error(
        "the network range {range} overlaps with {with}, which this host has a route to: choose another"
    )]
    RangeTaken {
        /// The requested range.
        range: String,
        /// The route in the way.
        with: String,
    },
    /// All slots are in use.
    #[error("all {0} network slots of this host are in use (see --network-slots)")]
    Full(u32),
}

impl NetError {
    pub(crate) fn host(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Host { what, source }
    }
}
