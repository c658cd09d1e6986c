//! [`Peers`]: the interface through which the tables reach other members.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor.

use async_trait::async_trait;
use bytes::Bytes;
use jiffy_fleet_core::{MemberId, Term};
use std::fmt;

/// Failure of a request to another member.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// The request was not sent.
    #[error("{member} is not reachable: {reason}")]
    Unreachable {
        /// Member.
        member: MemberId,
        /// Cause.
        reason: String,
    },
    /// The member may have executed the request.
    #[error("{member} did not answer: {reason}")]
    NoAnswer {
        /// Member.
        member: MemberId,
        /// Cause.
        reason: String,
    },
}

/// Members of the fleet, and requests to them. The transport authenticates both sides.
#[async_trait]
pub trait Peers: fmt::Debug + Send + Sync {
    /// Returns the id of this member.
    fn own(&self) -> MemberId;

    /// Returns the member that may write the tables, with its term. Returns the own id only while
    /// the term of this member is valid.
    fn writer(&self) -> Option<(MemberId, Term)>;

    /// Returns all members that are not dead and have not left, without this one.
    fn others(&self) -> Vec<MemberId>;

    /// Sends a request to another member, and returns the response. The caller limits its duration.
    async fn call(&self, to: MemberId, path: &str, body: Bytes) -> Result<Bytes, PeerError>;
}
