//! Forwards requests of clients to the host of the fleet that has the sandbox.
//!
//! The *head* of a request or response is its first line and its headers, without the body. A
//! *permit* counts towards a limit until it is dropped. An *exchange* is a request to a sandbox or
//! function with its response or stream.

use super::{GatewayState, RequestContext};
use crate::body::{Body, full};
use crate::counters::add;
use crate::exchange::{self, Upstream};
use crate::headers::{requested_host, upgrade};
use crate::in_flight_exchange::InFlightExchange;
use crate::other_hosts::{Location, MOVED, OtherHosts};
use crate::request_body::ClientRequestBody;
use crate::request_error::RequestError;
use crate::request_id::X_REQUEST_ID;
use crate::response_body::{BodyUntil, ClientResponseBody};
use crate::sandboxes::Sandboxes;
use crate::tunnel;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Incoming};
use hyper::header::{CONNECTION, EXPECT, HOST, HeaderValue, TE, UPGRADE};
use hyper::http::request::Parts;
use hyper::{Response, StatusCode, Uri, Version};
use jiffy_http::PooledBody;
use jiffy_http::headers::{has_token, strip_hop_by_hop};
use std::sync::Arc;
use tracing::Instrument;

/// Request to another host whose head has been rewritten.
struct Forwarded {
    parts: Parts,
    /// Protocol of the upgrade that the client requests. `None` if the client requests no upgrade.
    protocol: Option<HeaderValue>,
}

impl<S: Sandboxes> GatewayState<S> {
    /// Forwards a request for a sandbox that this host does not have. If the sandbox has moved, a
    /// request without a body is sent once more, to its new host.
    pub(crate) async fn forward(
        &self,
        hosts: &Arc<dyn OtherHosts>,
        sandbox: &str,
        parts: Parts,
        body: ClientRequestBody,
        context: RequestContext,
    ) -> Result<Response<Body>, RequestError> {
        // The other host counts the exchange for the owner of the sandbox, so this permit is empty.
        let permit = Box::new(());
        let max_exchanges = self.config.limits.exchanges;
        let in_flight = InFlightExchange::begin(&self.counters, max_exchanges, permit)
            .ok_or(RequestError::Overloaded)?;
        let host = host_of(hosts, sandbox).await?;
        let forwarded = rewritten(parts, &context);
        let is_repeatable = body.is_end_stream() && forwarded.protocol.is_none();
        let again = is_repeatable.then(|| forwarded.parts.clone());
        let is_upgrade = forwarded.protocol.is_some();
        let send = async |host: &Arc<str>, parts, body| {
            let upstream = Upstream::host(hosts, host.clone(), context.peer);
            tokio::select! {
                sent = exchange::send(self, &upstream, parts, body, is_upgrade) => sent,
                () = hosts.lost(host.clone()) => Err(lost(host)),
            }
        };
        let mut host = host;
        let (mut answer, mut connection) = send(&host, forwarded.parts, body).await?;
        if is_moved(&answer) {
            hosts.forget(sandbox);
            let Some(parts) = again else {
                return Err(RequestError::HostUnavailable(
                    "it has just moved to another host, and the request has a body".to_owned(),
                ));
            };
            add(&self.counters.repeated, 1);
            host = host_of(hosts, sandbox).await?;
            let body = ClientRequestBody::empty();
            (answer, connection) = send(&host, parts, body).await?;
            if is_moved(&answer) {
                hosts.forget(sandbox);
                return Err(RequestError::NotFound);
            }
        }
        add(&self.counters.forwarded, 1);
        let agreed = answer.headers().get(UPGRADE).cloned();
        let switched = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
        if switched && (forwarded.protocol.is_none() || agreed.is_none()) {
            return Err(RequestError::HostUnavailable(
                "its host switched to a protocol that was not requested".to_owned(),
            ));
        }
        let upstream = switched.then(|| hyper::upgrade::on(&mut answer));
        let (mut head, incoming) = answer.into_parts();
        head.version = Version::HTTP_11;
        strip_hop_by_hop(&mut head.headers);
        let end = hosts.lost(host);
        let Some(upstream) = upstream else {
            let body = PooledBody::new(incoming, Arc::clone(&self.host_pool.idle), connection);
            let body = ClientResponseBody::new(body, Arc::clone(&self.counters), in_flight);
            let body = BodyUntil::new(body.boxed_unsync(), Box::pin(end)).boxed_unsync();
            return Ok(Response::from_parts(head, body));
        };
        if let Some(agreed) = agreed {
            let headers = &mut head.headers;
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(UPGRADE, agreed);
        }
        let (counters, half_closed) = (Arc::clone(&self.counters), self.config.limits.half_closed);
        let stream = async move {
            if let (Ok(client), Ok(upstream)) = tokio::join!(context.upgrade, upstream) {
                add(&counters.upgraded, 1);
                tokio::select! {
                    () = tunnel::join(client, upstream, &counters, half_closed) => {}
                    () = end => {}
                }
            }
            // Hold the connection and the permit until the stream ends.
            drop((connection, in_flight));
        };
        context.tasks.spawn(stream.in_current_span());
        Ok(Response::from_parts(head, full("")))
    }
}

/// Returns the host of a sandbox.
async fn host_of(hosts: &Arc<dyn OtherHosts>, sandbox: &str) -> Result<Arc<str>, RequestError> {
    match hosts.locate(sandbox).await {
        Location::Host(host) => Ok(host),
        Location::Unknown => Err(RequestError::NotFound),
        Location::Unavailable(reason) => Err(RequestError::HostUnavailable(reason)),
    }
}

/// Rewrites the head of a request for HTTP/1.1. The other host removes the headers that a guest
/// must not receive.
fn rewritten(mut parts: Parts, context: &RequestContext) -> Forwarded {
    let protocol = upgrade(parts.version, &parts.headers);
    let trailers = has_token(&parts.headers, &TE, "trailers");
    let host = requested_host(&parts);
    let path = parts.uri.path_and_query().cloned();
    parts.uri = path.map_or_else(|| Uri::from_static("/"), Uri::from);
    parts.version = Version::HTTP_11;
    let headers = &mut parts.headers;
    strip_hop_by_hop(headers);
    // This gateway answers `Expect: 100-continue` itself, when it reads the client's body.
    headers.remove(EXPECT);
    if let Ok(host) = HeaderValue::from_str(&host) {
        headers.insert(HOST, host);
    }
    headers.insert(X_REQUEST_ID.clone(), context.request_id.value());
    if let Some(protocol) = &protocol {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol.clone());
    } else if trailers {
        headers.insert(CONNECTION, HeaderValue::from_static("te"));
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    Forwarded { parts, protocol }
}

fn is_moved(answer: &Response<Incoming>) -> bool {
    answer.status() == StatusCode::MISDIRECTED_REQUEST && answer.headers().contains_key(MOVED)
}

fn lost(host: &Arc<str>) -> RequestError {
    RequestError::HostUnavailable(format!("its host {host} was lost"))
}
