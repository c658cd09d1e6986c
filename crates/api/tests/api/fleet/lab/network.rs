//! Connections between the members of a laboratory.

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::Response;
use jiffy_api::{
    ByteStream, ForwardError, Forwarder, FunctionHost, receive_forwarded, receive_forwarded_stream,
};
use jiffy_fleet::node::{Answer as NodeAnswer, Messenger, MessengerError, Node, Query};
use jiffy_fleet_core::{Body as MessageBody, HostStatus, MemberId, Message};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use tower::ServiceExt;

/// Connections between the members.
#[derive(Default)]
pub struct Network {
    pub nodes: Mutex<BTreeMap<MemberId, Node>>,
    pub routers: Mutex<BTreeMap<MemberId, Router>>,
    /// Routers of functions.
    pub functions: Mutex<BTreeMap<MemberId, Router>>,
    pub frozen: Mutex<BTreeSet<MemberId>>,
}

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Network")
    }
}

impl Network {
    /// Waits forever if one of the members is frozen.
    async fn pass(&self, from: MemberId, to: MemberId) {
        let is_frozen = {
            let frozen = self.frozen.lock().unwrap();
            frozen.contains(&from) || frozen.contains(&to)
        };
        if is_frozen {
            std::future::pending().await
        }
    }
}

/// Connections of a member to the others, through the simulated network.
#[derive(Debug)]
pub struct Link {
    pub from: MemberId,
    pub network: Arc<Network>,
    /// State in the last heartbeat that another member has accepted.
    pub reported: Mutex<Option<HostStatus>>,
}

impl Link {
    async fn node(&self, to: MemberId) -> Result<Node, MessengerError> {
        self.network.pass(self.from, to).await;
        let node = self.network.nodes.lock().unwrap().get(&to).cloned();
        node.ok_or_else(|| unreachable_error(to, "stopped"))
    }
}

fn unreachable_error(member: MemberId, reason: impl ToString) -> MessengerError {
    MessengerError::Unreachable {
        member,
        address: String::new(),
        reason: reason.to_string(),
    }
}

#[async_trait]
impl Messenger for Link {
    async fn send(
        &self,
        to: MemberId,
        _address: &str,
        message: &Message,
    ) -> Result<Vec<Message>, MessengerError> {
        let replies = self
            .node(to)
            .await?
            .deliver(self.from, message.clone())
            .await;
        let replies = replies.map_err(|e| unreachable_error(to, e))?;
        // A host without a registration is rejected, and sends its state again later.
        let is_rejected = |reply: &Message| matches!(reply.body, MessageBody::Rejected(_));
        if let MessageBody::Heartbeat(heartbeat) = &message.body
            && !replies.iter().any(is_rejected)
        {
            *self.reported.lock().unwrap() = Some(heartbeat.status.clone());
        }
        Ok(replies)
    }

    async fn query(
        &self,
        to: MemberId,
        _address: &str,
        query: &Query,
    ) -> Result<NodeAnswer, MessengerError> {
        let answer = self.node(to).await?.answer(self.from, query.clone()).await;
        answer.map_err(|e| unreachable_error(to, e))
    }
}

#[async_trait]
impl Forwarder for Link {
    async fn forward(
        &self,
        to: MemberId,
        _address: &str,
        mut request: Request<Body>,
    ) -> Result<Response, ForwardError> {
        self.network.pass(self.from, to).await;
        receive_forwarded(&mut request);
        let routers = match request.extensions().get::<FunctionHost>() {
            Some(_) => &self.network.functions,
            None => &self.network.routers,
        };
        let router = routers.lock().unwrap().get(&to).cloned();
        let router = router.ok_or_else(|| ForwardError {
            is_unsent: true,
            reason: "stopped".to_owned(),
        })?;
        Ok(router.oneshot(request).await.unwrap())
    }

    async fn open_stream(
        &self,
        to: MemberId,
        _address: &str,
        request: Request<()>,
    ) -> Result<Result<Box<dyn ByteStream>, Response>, ForwardError> {
        self.network.pass(self.from, to).await;
        let router = self.network.routers.lock().unwrap()[&to].clone();
        let (own, theirs) = tokio::io::duplex(1024);
        let mut request = request.map(|()| Body::empty());
        receive_forwarded_stream(&mut request, Box::new(theirs));
        let response = router.oneshot(request).await.unwrap();
        Ok(match response.status() {
            StatusCode::SWITCHING_PROTOCOLS => Ok(Box::new(own)),
            _ => Err(response),
        })
    }
}
