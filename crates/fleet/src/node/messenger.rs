//! [`Messenger`]: the interface by which a node sends messages and queries to other members. The
//! daemon uses the members' channel, and tests use memory.

use super::query::{Answer, Query};
use async_trait::async_trait;
use jiffy_fleet_core::{MemberId, Message};
use std::fmt;

/// Sends messages and queries to other members.
///
/// Each call must end within a few seconds. The receiver passes a message to
/// [`super::Node::deliver`] and a query to [`super::Node::answer`], with the number of the sender
/// from its certificate.
#[async_trait]
pub trait Messenger: fmt::Debug + Send + Sync {
    /// Sends a message. Returns the messages with which the receiver replies at once.
    ///
    /// # Errors
    /// [`MessengerError`] if the receiver did not confirm the message. It may have arrived.
    async fn send(
        &self,
        to: MemberId,
        address: &str,
        message: &Message,
    ) -> Result<Vec<Message>, MessengerError>;

    /// Sends a query and returns its answer.
    ///
    /// # Errors
    /// [`MessengerError`] if no answer arrived.
    async fn query(
        &self,
        to: MemberId,
        address: &str,
        query: &Query,
    ) -> Result<Answer, MessengerError>;
}

/// Failure of a transmission to a member.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessengerError {
    /// The member does not accept connections, or did not answer in time.
    #[error("{member} at {address} is not reachable: {reason}")]
    Unreachable {
        /// Member.
        member: MemberId,
        /// Address of the member.
        address: String,
        /// Reason.
        reason: String,
    },
    /// The member rejected the request, or its answer is malformed.
    #[error("{member} rejected the request: {reason}")]
    Rejected {
        /// Member.
        member: MemberId,
        /// Reason.
        reason: String,
    },
}
