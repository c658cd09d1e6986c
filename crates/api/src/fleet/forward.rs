//! Calls that are forwarded to another member, and calls that another member has forwarded.

use super::route::is_moved;
use super::{Fleet, ForwardError, host_lost, unavailable};
use crate::caller::{Caller, ClientAddress};
use crate::error::ApiError;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::response::Response;
use bytes::Bytes;
use jiffy_fleet::node::Place;
use jiffy_fleet_core::{MemberId, SandboxHash};
use jiffy_http::headers::strip_hop_by_hop;
use std::future::Future;
use std::net::IpAddr;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Maximum duration of the answer of a member to a call that all members receive.
const MEMBER_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of members that answer such a call at the same time.
const MAX_CONCURRENT: usize = 64;
/// Header of forwarded calls: the caller is the owner of the member that forwards.
const OWNER: HeaderName = HeaderName::from_static("jiffy-forwarded-owner");
/// Header of forwarded calls: address of the client.
const CLIENT: HeaderName = HeaderName::from_static("jiffy-forwarded-for");

/// Extension of a call that another member has forwarded. It is never forwarded again.
#[derive(Debug, Clone, Copy)]
pub(super) struct Forwarded;

/// Call whose body was read, so that it can be sent more than once.
#[derive(Clone)]
pub(super) struct BufferedCall {
    pub method: Method,
    pub uri: Uri,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub caller: Caller,
    pub client: Option<IpAddr>,
}

impl BufferedCall {
    /// Returns the request for another member.
    fn request(&self) -> Request<Body> {
        let mut request = Request::new(Body::from(self.body.clone()));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        prepare(&mut request, &self.caller, self.client);
        request
    }
}

/// Removes headers of a single connection and headers that only members may set, and sets the
/// latter.
fn prepare(request: &mut Request<Body>, caller: &Caller, client: Option<IpAddr>) {
    let headers = request.headers_mut();
    strip_hop_by_hop(headers);
    // The body was read completely: it has no trailers, and the transport sets its length.
    for name in [OWNER, CLIENT, header::TRAILER, header::CONTENT_LENGTH] {
        headers.remove(name);
    }
    if caller.is_owner() {
        headers.insert(OWNER, HeaderValue::from_static("true"));
    }
    if let Some(address) = client.and_then(|ip| HeaderValue::from_str(&ip.to_string()).ok()) {
        headers.insert(CLIENT, address);
    }
}

/// Prepares a call that another member has forwarded, for the router of this member. The caller
/// must have authenticated the member by its certificate.
pub fn receive_forwarded(request: &mut Request<Body>) {
    let headers = request.headers_mut();
    let is_owner = headers.remove(OWNER).is_some();
    let client = headers.remove(CLIENT);
    let client = client.and_then(|value| value.to_str().ok()?.parse().ok());
    let extensions = request.extensions_mut();
    extensions.insert(Forwarded);
    // A member holds the keys of the store: it may act as the owner of any host.
    if is_owner {
        extensions.insert(Caller::Owner);
    }
    if let Some(client) = client {
        extensions.insert(ClientAddress(client));
    }
}

impl Fleet {
    /// Sends a call to a member. The response ends with an error if the member is declared dead
    /// before its head arrives.
    pub(super) async fn send(
        &self,
        member: MemberId,
        address: &str,
        call: &BufferedCall,
    ) -> Result<Response, ForwardError> {
        let sent = self.forwarder.forward(member, address, call.request());
        tokio::select! {
            sent = sent => sent,
            () = self.node.until_lost(member) => Err(ForwardError {
                is_unsent: false,
                reason: "the host was declared dead".to_owned(),
            }),
        }
    }

    /// Sends a call to all other live members at the same time. Returns each member with its
    /// address and the result of `read`. The result is `None` for a member that does not answer in
    /// time.
    pub(super) async fn send_to_all<T, F>(
        &self,
        call: &BufferedCall,
        read: fn(Response) -> F,
    ) -> Vec<(MemberId, String, Option<T>)>
    where
        T: Send + 'static,
        F: Future<Output = Option<T>> + Send + 'static,
    {
        let mut waiting = self.node.members().peers(self.node.id()).into_iter();
        let mut running = JoinSet::new();
        let mut answers = Vec::new();
        loop {
            while running.len() < MAX_CONCURRENT
                && let Some((member, address)) = waiting.next()
            {
                let (fleet, call) = (self.clone(), call.clone());
                running.spawn(async move {
                    let answer = async {
                        let sent = fleet.send(member, &address, &call).await;
                        read(sent.ok()?).await
                    };
                    let answer = timeout(MEMBER_TIMEOUT, answer).await.ok().flatten();
                    (member, address, answer)
                });
            }
            match running.join_next().await {
                // The tasks do not panic.
                Some(joined) => answers.extend(joined.ok()),
                None => return answers,
            }
        }
    }

    /// Sends a call on a sandbox to the member at `place`, and once more if the sandbox has moved.
    pub(super) async fn send_to_place(
        &self,
        hash: SandboxHash,
        mut place: Place,
        call: &BufferedCall,
    ) -> Result<Option<Response>, ApiError> {
        for attempt in 0..2 {
            if !place.is_live {
                return Err(host_lost(place.member, "it was declared dead"));
            }
            match self.send(place.member, &place.address, call).await {
                Ok(response) if !is_moved(&response) => return Ok(Some(response)),
                Ok(_) => {}
                Err(error) => {
                    let is_stale = place.is_remembered && error.is_unsent;
                    if !is_stale || attempt > 0 {
                        return Err(host_lost(place.member, &error.reason));
                    }
                }
            }
            self.node.forget(hash);
            match self.node.locate(hash).await? {
                None => return Ok(None),
                // This member has it now.
                Some(new) if new.member == self.node.id() => return Ok(None),
                Some(new) => place = new,
            }
        }
        Err(unavailable(
            "the sandbox moves between hosts at this moment: retry",
        ))
    }
}
