//! Requests about the tables (API keys, template names) between members, over the members' channel.

use super::{CHANGE_TIMEOUT, PeerError, Peers, Tables};
use crate::channel::{Client, MessageHandler, Rejected};
use crate::node::Node;
use async_trait::async_trait;
use bytes::Bytes;
use jiffy_fleet_core::{MemberId, Term};
use std::time::Duration;

/// Limit of a request. It exceeds the limit of a change, which the other member reports.
const LIMIT: Duration = CHANGE_TIMEOUT.saturating_add(Duration::from_secs(2));

/// Members of the fleet, as the node of this host knows them.
#[derive(Debug)]
pub struct ChannelPeers {
    node: Node,
    client: Client,
}

impl ChannelPeers {
    /// Uses the members that `node` knows.
    #[must_use]
    pub fn new(node: Node, client: Client) -> Self {
        Self { node, client }
    }
}

#[async_trait]
impl Peers for ChannelPeers {
    fn own(&self) -> MemberId {
        self.node.id()
    }

    fn writer(&self) -> Option<(MemberId, Term)> {
        self.node.coordinator()
    }

    fn others(&self) -> Vec<MemberId> {
        let peers = self.node.members().peers(self.node.id());
        peers.into_iter().map(|(member, _)| member).collect()
    }

    async fn call(&self, to: MemberId, path: &str, body: Bytes) -> Result<Bytes, PeerError> {
        let address = self.node.members().row(to).map(|row| row.address.clone());
        let Some(address) = address else {
            return Err(PeerError::Unreachable {
                member: to,
                reason: "it is not a member of the fleet".to_owned(),
            });
        };
        let sent = self.client.message(to, &address, path, body, LIMIT).await;
        sent.map_err(|e| {
            let reason = e.to_string();
            if e.is_unsent() {
                PeerError::Unreachable { member: to, reason }
            } else {
                PeerError::NoAnswer { member: to, reason }
            }
        })
    }
}

#[async_trait]
impl MessageHandler for Tables {
    async fn message(&self, peer: MemberId, message: Bytes) -> Result<Bytes, Rejected> {
        let answer = self.handle(peer, &message).await;
        answer
            .map(Bytes::from)
            .map_err(|e| Rejected::new(400, e.to_string()))
    }
}
