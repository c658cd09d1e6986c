//! Calls of the API between members of a fleet, over the members' channel: a member forwards the
//! calls on sandboxes of other members, and receives theirs.
//!
//! A *member* is a host of the fleet. The *head* of a request or response is its first line and its
//! headers, without the body.

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::http::uri::{PathAndQuery, Uri};
use jiffy_api::{
    ByteStream, ForwardError, Forwarder, FunctionHost, receive_forwarded, receive_forwarded_stream,
};
use jiffy_fleet::channel::{self, Client, Handler, Interrupted, Rejected, accept_stream};
use jiffy_fleet_core::MemberId;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio_util::io::ReaderStream;
use tower::ServiceExt;

/// Prefix of the paths of forwarded calls.
pub const CALL_PREFIX: &str = "/api";
/// Prefix of the paths of forwarded requests for streams to ports.
pub const STREAM_PREFIX: &str = "/streams";
/// Maximum time until a stream is open. The receiver has a shorter limit.
const STREAM_TIMEOUT: Duration = Duration::from_secs(35);
/// Maximum time until the head of a response. Some calls wait for their sandbox.
const HEAD_TIMEOUT: Duration = Duration::from_secs(3600);

/// Forwards calls over the channel.
pub struct ChannelForwarder(Client);

impl ChannelForwarder {
    pub fn new(client: Client) -> Self {
        Self(client)
    }
}

/// Returns the error of a call that was not sent to the other member.
fn unsent(reason: impl ToString) -> ForwardError {
    ForwardError {
        is_unsent: true,
        reason: reason.to_string(),
    }
}

#[async_trait]
impl Forwarder for ChannelForwarder {
    async fn forward(
        &self,
        to: MemberId,
        address: &str,
        request: Request<Body>,
    ) -> Result<Response, ForwardError> {
        let (mut parts, body) = request.into_parts();
        parts.uri = below(CALL_PREFIX, &parts.uri)?;
        parts.version = hyper::Version::HTTP_2;
        // HTTP/2 has the host in its pseudo-header, which names the member.
        parts.headers.remove(hyper::header::HOST);
        let body = body.map_err(Interrupted::new).boxed_unsync();
        let request = Request::from_parts(parts, body);
        let sent = self.0.request(to, address, request, HEAD_TIMEOUT).await;
        let response = sent.map_err(|error| ForwardError {
            is_unsent: error.is_unsent(),
            reason: error.to_string(),
        })?;
        let (mut parts, body) = response.into_parts();
        parts.version = hyper::Version::HTTP_11;
        parts.extensions.clear();
        Ok(Response::from_parts(parts, Body::new(body)))
    }

    async fn open_stream(
        &self,
        to: MemberId,
        address: &str,
        mut request: Request<()>,
    ) -> Result<Result<Box<dyn ByteStream>, Response>, ForwardError> {
        *request.uri_mut() = below(STREAM_PREFIX, request.uri())?;
        *request.version_mut() = hyper::Version::HTTP_2;
        request.headers_mut().remove(hyper::header::HOST);
        let opened = self.0.open_stream(to, address, request, STREAM_TIMEOUT);
        let response = opened.await.map_err(|error| ForwardError {
            is_unsent: error.is_unsent(),
            reason: error.to_string(),
        })?;
        if response.status() == hyper::StatusCode::OK {
            return Ok(Ok(Box::new(response.into_body())));
        }
        let (mut parts, body) = response.into_parts();
        parts.version = hyper::Version::HTTP_11;
        parts.extensions.clear();
        let body = Body::from_stream(ReaderStream::new(body));
        Ok(Err(Response::from_parts(parts, body)))
    }
}

/// Returns a URI below a prefix.
fn below(prefix: &str, uri: &Uri) -> Result<Uri, ForwardError> {
    let path = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    format!("{prefix}{path}").parse().map_err(unsent)
}

/// Receives calls of other members, below [`CALL_PREFIX`].
#[derive(Default)]
pub struct ForwardedCalls(OnceLock<Routers>);

/// Routers of forwarded calls.
struct Routers {
    api: Router,
    functions: Router,
}

impl ForwardedCalls {
    /// Sets the routers of the API and of functions. Calls are rejected until then.
    pub fn set_routers(&self, api: Router, functions: Router) {
        // Ignore the result: this function is called once, at the start, so the cell is empty.
        let _ = self.0.set(Routers { api, functions });
    }
}

/// Returns the path of a call without the prefix.
fn call_uri(prefix: &str, uri: &Uri) -> Option<Uri> {
    let path = uri.path_and_query()?.as_str().strip_prefix(prefix)?;
    path.parse().ok()
}

/// Receives requests of other members for streams to ports, below [`STREAM_PREFIX`].
pub struct ForwardedPortStreams(pub Arc<ForwardedCalls>);

#[async_trait]
impl Handler for ForwardedPortStreams {
    async fn handle(
        &self,
        _peer: MemberId,
        request: hyper::Request<Incoming>,
    ) -> hyper::Response<channel::Body> {
        let Some(routers) = self.0.0.get() else {
            return Rejected::new(503, "the daemon is starting").response();
        };
        let Some(uri) = call_uri(STREAM_PREFIX, request.uri()) else {
            return Rejected::new(404, "unknown path").response();
        };
        let mut call = hyper::Request::new(Body::empty());
        *call.uri_mut() = uri;
        *call.headers_mut() = request.headers().clone();
        let (stream, accepted) = accept_stream(request);
        receive_forwarded_stream(&mut call, Box::new(stream));
        let answered = routers.api.clone().oneshot(call).await;
        let response = answered.unwrap_or_else(|never| match never {});
        if response.status() == hyper::StatusCode::SWITCHING_PROTOCOLS {
            return accepted;
        }
        response.map(|body| body.map_err(Interrupted::new).boxed_unsync())
    }
}

#[async_trait]
impl Handler for ForwardedCalls {
    async fn handle(
        &self,
        _peer: MemberId,
        request: hyper::Request<Incoming>,
    ) -> hyper::Response<channel::Body> {
        let Some(routers) = self.0.get() else {
            return Rejected::new(503, "the daemon is starting").response();
        };
        let Some(uri) = call_uri(CALL_PREFIX, request.uri()) else {
            return Rejected::new(404, "unknown path").response();
        };
        let mut request = request.map(Body::new);
        *request.uri_mut() = uri;
        receive_forwarded(&mut request);
        let is_function = request.extensions().get::<FunctionHost>().is_some();
        let router = if is_function {
            &routers.functions
        } else {
            &routers.api
        };
        let answered = router.clone().oneshot(request).await;
        let response = answered.unwrap_or_else(|never| match never {});
        response.map(|body| body.map_err(Interrupted::new).boxed_unsync())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefix_of_forwarded_calls_is_removed_once() {
        let uri =
            |text: &str| call_uri(CALL_PREFIX, &text.parse().unwrap()).map(|uri| uri.to_string());
        assert_eq!(
            uri("https://h2/api/v2/sandboxes?limit=1").as_deref(),
            Some("/v2/sandboxes?limit=1")
        );
        assert_eq!(uri("/api/api/x").as_deref(), Some("/api/x"));
        assert_eq!(uri("/sandboxes"), None);
        assert_eq!(uri("/api"), None);
    }
}
