//! Forwarding of calls to the member of the fleet that has the sandbox, and the receipt of calls
//! that another member forwards.
//!
//! A *member* is a host of the fleet. The *coordinator* is the member of the fleet that selects the
//! hosts of new sandboxes and declares silent members dead. An *admission* is the permission of the
//! coordinator for one new sandbox on a host. The *head* of a request or response is its first line
//! and its headers, without the body.

use super::lists::ListPart;
use super::route::is_moved;
use super::{Fleet, ForwardError, host_lost, unavailable};
use crate::caller::{Caller, ClientAddress};
use crate::error::ApiError;
use crate::routes::FunctionHost;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::response::Response;
use bytes::Bytes;
use jiffy_fleet::node::Place;
use jiffy_fleet_core::{Admission, MemberId, SandboxHash};
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
/// Header of forwarded creates: admission by the coordinator.
const PLACEMENT: HeaderName = HeaderName::from_static("jiffy-forwarded-placement");
/// Header of forwarded calls: address of the client.
const CLIENT: HeaderName = HeaderName::from_static("jiffy-forwarded-for");
/// Header of forwarded calls: host name by which the client reaches the fleet.
const HOST: HeaderName = HeaderName::from_static("jiffy-forwarded-host");
/// Header of forwarded calls whose answer is not meant for the client: a value of [`Purpose`].
const PURPOSE: HeaderName = HeaderName::from_static("jiffy-forwarded-purpose");
/// Header of forwarded requests to functions: label of the function, the part of its host name that
/// identifies it.
pub(super) const FUNCTION: HeaderName = HeaderName::from_static("jiffy-forwarded-function");
/// Value of the header [`OWNER`].
const TRUE: HeaderValue = HeaderValue::from_static("true");

/// Extension of a call that another member has forwarded. It is never forwarded again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Forwarded(pub Purpose);

/// Purpose of a forwarded call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The receiver executes the call.
    Call,
    /// The receiver only answers whether it has the object of the call.
    Probe,
    /// The answer is merged with the answers of other members.
    Part,
}

impl Purpose {
    fn header(self) -> Option<HeaderValue> {
        match self {
            Self::Call => None,
            Self::Probe => Some(HeaderValue::from_static("probe")),
            Self::Part => Some(HeaderValue::from_static("part")),
        }
    }

    fn of(header: Option<&HeaderValue>) -> Self {
        let purposes = [Self::Probe, Self::Part].into_iter();
        let mut purposes = purposes.filter(|purpose| header == purpose.header().as_ref());
        purposes.next().unwrap_or(Self::Call)
    }
}

/// Extension of a create that another member has forwarded after a decision of the coordinator.
#[derive(Debug, Clone)]
pub(super) struct AdmittedCreate(pub Admission);

/// Call whose body was read, so that it can be sent more than once.
#[derive(Clone)]
pub(super) struct BufferedCall {
    pub method: Method,
    pub uri: Uri,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub caller: Caller,
    /// Address of the client.
    pub client: Option<IpAddr>,
    pub purpose: Purpose,
    /// Admission of a create by the coordinator.
    pub placement: Option<Admission>,
}

impl BufferedCall {
    /// Returns the request for another member.
    fn request(&self) -> Request<Body> {
        let mut request = Request::new(Body::from(self.body.clone()));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        prepare(&mut request, Some(&self.caller), self.client);
        let placement = self.placement.as_ref();
        let placement = placement.and_then(|admission| serde_json::to_string(admission).ok());
        if let Some(value) = placement.and_then(|text| HeaderValue::from_str(&text).ok()) {
            request.headers_mut().insert(PLACEMENT, value);
        }
        if let Some(purpose) = self.purpose.header() {
            request.headers_mut().insert(PURPOSE, purpose);
        }
        request
    }
}

/// Removes headers of a single connection and headers that only members may set, and sets the
/// latter.
pub(super) fn prepare(
    request: &mut Request<Body>,
    caller: Option<&Caller>,
    client: Option<IpAddr>,
) {
    let headers = request.headers_mut();
    strip_hop_by_hop(headers);
    // The body was read completely: it has no trailers, and the transport sets its length.
    for name in [
        OWNER,
        CLIENT,
        HOST,
        PURPOSE,
        PLACEMENT,
        header::TRAILER,
        header::CONTENT_LENGTH,
    ] {
        headers.remove(name);
    }
    if caller.is_some_and(Caller::is_owner) {
        headers.insert(OWNER, TRUE);
    }
    // The transport replaces the host by the member.
    if let Some(host) = headers.remove(header::HOST) {
        headers.insert(HOST, host);
    }
    if let Some(address) = client.and_then(|ip| HeaderValue::from_str(&ip.to_string()).ok()) {
        headers.insert(CLIENT, address);
    }
}

/// Prepares a call that another member has forwarded, for the router of this member. Requests with
/// a [`FunctionHost`] are for the router of functions. The caller must have authenticated the
/// member by its certificate.
pub fn receive_forwarded(request: &mut Request<Body>) {
    let headers = request.headers_mut();
    let is_owner = headers.remove(OWNER).is_some();
    let purpose = Purpose::of(headers.remove(PURPOSE).as_ref());
    if let Some(host) = headers.remove(HOST) {
        headers.insert(header::HOST, host);
    }
    let function = headers.remove(FUNCTION);
    let function = function.and_then(|label| label.to_str().ok().map(str::to_owned));
    let client = headers.remove(CLIENT);
    let placement = headers.remove(PLACEMENT);
    let placement = placement.and_then(|value| serde_json::from_str(value.to_str().ok()?).ok());
    let client = client.and_then(|value| value.to_str().ok()?.parse().ok());
    let extensions = request.extensions_mut();
    extensions.insert(Forwarded(purpose));
    if let Some(label) = function {
        extensions.insert(FunctionHost(label));
    }
    if let Some(admission) = placement {
        extensions.insert(AdmittedCreate(admission));
    }
    if purpose == Purpose::Part {
        extensions.insert(ListPart);
    }
    // Each member has the keys of the store and so access to all data. The receiver can therefore
    // trust the statement that the caller is the owner.
    if is_owner {
        extensions.insert(Caller::Owner);
    }
    if let Some(client) = client {
        extensions.insert(ClientAddress(client));
    }
}

impl Fleet {
    /// Sends a call to a member. Fails if the member is declared dead before the head of the
    /// response arrives.
    pub(super) async fn send(
        &self,
        member: MemberId,
        address: &str,
        call: &BufferedCall,
    ) -> Result<Response, ForwardError> {
        let sent = self.forwarder.forward(member, address, call.request());
        self.until_answered(member, sent).await
    }

    /// Waits for a response. Returns an error if the member is declared dead before.
    pub(super) async fn until_answered<T>(
        &self,
        member: MemberId,
        sent: impl Future<Output = Result<T, ForwardError>>,
    ) -> Result<T, ForwardError> {
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
                return Err(self.host_lost(place.member));
            }
            match self.send(place.member, &place.address, call).await {
                Ok(response) if !is_moved(&response) => return Ok(Some(response)),
                Ok(_) => {}
                Err(error) => {
                    // The sandbox may have moved since the place was remembered. If the request was
                    // not sent, the place is therefore looked up again once.
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
