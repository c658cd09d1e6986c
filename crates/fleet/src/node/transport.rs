//! Messages and queries over the members' channel (HTTP/2 with mutual TLS): client and server side.

use super::handle::{Node, NodeError};
use super::messenger::{Messenger, MessengerError};
use super::query::{Answer, Query, decode_replies, encode_replies};
use crate::channel::{ChannelError, Client, MessageHandler, Rejected};
use async_trait::async_trait;
use bytes::Bytes;
use jiffy_fleet_core::{MemberId, Message};
use std::time::Duration;

/// Path of messages of the membership protocol.
pub const MESSAGE_PATH: &str = "/fleet/message";
/// Path of queries.
pub const QUERY_PATH: &str = "/fleet/query";
/// Maximum duration of a message or query.
const LIMIT: Duration = Duration::from_secs(2);

/// Sends messages and queries over the channel.
#[derive(Debug, Clone)]
pub struct ChannelMessenger(Client);

impl ChannelMessenger {
    /// Uses the connections of `client`.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self(client)
    }

    /// Sends a message to a member, and converts a failure.
    async fn call(
        &self,
        to: MemberId,
        address: &str,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Bytes, MessengerError> {
        let sent = self.0.message(to, address, path, body.into(), LIMIT).await;
        sent.map_err(|error| match error {
            ChannelError::Rejected { reason, .. } => rejected(to, reason),
            error => MessengerError::Unreachable {
                member: to,
                address: address.to_owned(),
                reason: error.to_string(),
            },
        })
    }
}

fn rejected(member: MemberId, reason: impl ToString) -> MessengerError {
    let reason = reason.to_string();
    MessengerError::Rejected { member, reason }
}

#[async_trait]
impl Messenger for ChannelMessenger {
    async fn send(
        &self,
        to: MemberId,
        address: &str,
        message: &Message,
    ) -> Result<Vec<Message>, MessengerError> {
        let body = message.encode().map_err(|e| rejected(to, e))?;
        let replies = self.call(to, address, MESSAGE_PATH, body).await?;
        decode_replies(&replies).map_err(|e| rejected(to, e))
    }

    async fn query(
        &self,
        to: MemberId,
        address: &str,
        query: &Query,
    ) -> Result<Answer, MessengerError> {
        let body = query.encode().map_err(|e| rejected(to, e))?;
        let answer = self.call(to, address, QUERY_PATH, body).await?;
        Answer::decode(&answer).map_err(|e| rejected(to, e))
    }
}

/// Receives messages of other members, on [`MESSAGE_PATH`].
#[derive(Debug)]
pub struct MessageReceiver(pub Node);

/// Answers queries of other members, on [`QUERY_PATH`].
#[derive(Debug)]
pub struct QueryReceiver(pub Node);

fn malformed(error: impl ToString) -> Rejected {
    Rejected::new(400, error.to_string())
}

fn busy(error: NodeError) -> Rejected {
    Rejected::new(503, error.to_string())
}

#[async_trait]
impl MessageHandler for MessageReceiver {
    async fn message(&self, peer: MemberId, message: Bytes) -> Result<Bytes, Rejected> {
        let message = Message::decode(&message).map_err(malformed)?;
        let replies = self.0.deliver(peer, message).await.map_err(busy)?;
        let replies = encode_replies(&replies).map_err(malformed)?;
        Ok(replies.into())
    }
}

#[async_trait]
impl MessageHandler for QueryReceiver {
    async fn message(&self, peer: MemberId, message: Bytes) -> Result<Bytes, Rejected> {
        let query = Query::decode(&message).map_err(malformed)?;
        let answer = self.0.answer(peer, query).await.map_err(busy)?;
        let answer = answer.encode().map_err(malformed)?;
        Ok(answer.into())
    }
}
