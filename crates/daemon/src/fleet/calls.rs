//! Calls of the API between members.

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::http::uri::{PathAndQuery, Uri};
use jiffy_api::{ForwardError, Forwarder, receive_forwarded};
use jiffy_fleet::channel::{self, Client, Handler, Interrupted, Rejected};
use jiffy_fleet_core::MemberId;
use std::sync::OnceLock;
use std::time::Duration;
use tower::ServiceExt;

/// Prefix of the paths of forwarded calls.
pub const CALL_PREFIX: &str = "/api";
/// Maximum time until the head of a response. Some calls wait for their sandbox.
const HEAD_TIMEOUT: Duration = Duration::from_secs(3600);

/// Forwards calls over the channel.
pub struct ChannelForwarder(Client);

impl ChannelForwarder {
    pub fn new(client: Client) -> Self {
        Self(client)
    }
}

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
        let path = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        parts.uri = format!("{CALL_PREFIX}{path}").parse().map_err(unsent)?;
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
}

/// Receives calls of other members, below [`CALL_PREFIX`].
#[derive(Default)]
pub struct ForwardedCalls(OnceLock<Router>);

impl ForwardedCalls {
    /// Sets the router of the API. Calls are rejected until then.
    pub fn set_router(&self, router: Router) {
        let _ = self.0.set(router);
    }
}

/// Returns the path of a call without the prefix.
fn call_uri(uri: &Uri) -> Option<Uri> {
    let path = uri.path_and_query()?.as_str().strip_prefix(CALL_PREFIX)?;
    path.parse().ok()
}

#[async_trait]
impl Handler for ForwardedCalls {
    async fn handle(
        &self,
        _peer: MemberId,
        request: hyper::Request<Incoming>,
    ) -> hyper::Response<channel::Body> {
        let Some(router) = self.0.get().cloned() else {
            return Rejected::new(503, "the daemon is starting").response();
        };
        let Some(uri) = call_uri(request.uri()) else {
            return Rejected::new(404, "unknown path").response();
        };
        let mut request = request.map(Body::new);
        *request.uri_mut() = uri;
        receive_forwarded(&mut request);
        let answered = router.oneshot(request).await;
        let response = answered.unwrap_or_else(|never| match never {});
        response.map(|body| body.map_err(Interrupted::new).boxed_unsync())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefix_of_forwarded_calls_is_removed_once() {
        let uri = |text: &str| call_uri(&text.parse().unwrap()).map(|uri| uri.to_string());
        assert_eq!(
            uri("https://h2/api/v2/sandboxes?limit=1").as_deref(),
            Some("/v2/sandboxes?limit=1")
        );
        assert_eq!(uri("/api/api/x").as_deref(), Some("/api/x"));
        assert_eq!(uri("/sandboxes"), None);
        assert_eq!(uri("/api"), None);
    }
}
