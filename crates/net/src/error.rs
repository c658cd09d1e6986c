//! Why there is no network.

use std::io;

/// Why a network could not be made or changed.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// This machine or this user cannot.
    #[error("{0}")]
    Unable(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    Host {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A program failed.
    #[error("{program} failed: {said}")]
    Program {
        /// Which.
        program: &'static str,
        /// What it said.
        said: String,
    },
    /// Rules that cannot be kept.
    #[error(transparent)]
    Rules(#[from] crate::RulesError),
    /// No range of addresses is free.
    #[error(
        "no range of addresses for sandboxes is free beside the routes of this host: name one with --network-range"
    )]
    NoRange,
    /// The range that was asked for is taken.
    #[error(
        "the network range {range} overlaps with {with}, which this host has a route to: choose another"
    )]
    RangeTaken {
        /// What was asked for.
        range: String,
        /// What is there.
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
