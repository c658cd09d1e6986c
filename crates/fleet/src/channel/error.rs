//! Errors of requests to other members of the fleet. [`ChannelError::is_unsent`] distinguishes
//! requests that the peer certainly has not received: only such a request may be sent to another
//! member without the risk that it is executed twice.

use jiffy_fleet_core::MemberId;
use std::time::Duration;

/// Error of a request to another member.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChannelError {
    /// No connection could be established.
    #[error("cannot connect to {member} at {address}: {reason}")]
    Connect {
        /// Addressed member.
        member: MemberId,
        /// Address of the member.
        address: String,
        /// Reason.
        reason: String,
    },
    /// The address belongs to another member.
    #[error(
        "another member answers at {address}, the address of {member}: {reason}; \
         check the addresses of both members"
    )]
    OtherMember {
        /// Addressed member.
        member: MemberId,
        /// Address of the member.
        address: String,
        /// Reason.
        reason: String,
    },
    /// The peer's certificate is expired, or was issued by another authority.
    #[error("cannot trust the host at {address} as {member}: {reason}")]
    Untrusted {
        /// Addressed member.
        member: MemberId,
        /// Address of the member.
        address: String,
        /// Reason.
        reason: String,
    },
    /// The peer did not answer in time. It may have executed the request.
    #[error("{member} did not answer within {} ms", limit.as_millis())]
    Timeout {
        /// Addressed member.
        member: MemberId,
        /// Limit.
        limit: Duration,
    },
    /// The connection was lost. The peer may have executed the request.
    #[error("lost the connection to {member}: {reason}")]
    Lost {
        /// Addressed member.
        member: MemberId,
        /// Reason.
        reason: String,
    },
    /// The peer rejected the message.
    #[error("{member} rejected the message with status {status}: {reason}")]
    Rejected {
        /// Addressed member.
        member: MemberId,
        /// HTTP status.
        status: u16,
        /// Reason of the peer.
        reason: String,
    },
    /// The message or its response is too large.
    #[error("a message to or from {member} exceeds {max} bytes")]
    TooLarge {
        /// Addressed member.
        member: MemberId,
        /// Maximum size.
        max: usize,
    },
    /// The request is malformed.
    #[error("cannot send a request to {member}: {reason}")]
    Request {
        /// Addressed member.
        member: MemberId,
        /// Reason.
        reason: String,
    },
}

impl ChannelError {
    /// Returns whether the peer cannot have received the request.
    pub fn is_unsent(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. }
                | Self::OtherMember { .. }
                | Self::Untrusted { .. }
                | Self::Request { .. }
        )
    }
}
