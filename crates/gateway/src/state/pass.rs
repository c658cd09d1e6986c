//! Forwards requests of clients to guests, after checking the client's access.
//!
//! Called by [`crate::gateway::Gateway`] for each request whose route is a sandbox.
//!
//! The *head* of a request or response is its first line and its headers, without the body. A
//! *permit* counts towards a limit until it is dropped. An *exchange* is a request to a sandbox or
//! function with its response or stream.

use super::GatewayState;
use crate::body::{Body, full};
use crate::counters::add;
use crate::exchange::{self, Upstream};
use crate::guest_calls::PendingGuestCall;
use crate::headers::{HeaderRewrite, TRAFFIC_TOKEN, requested_host, upgrade};
use crate::host_only_path::is_host_only;
use crate::in_flight_exchange::InFlightExchange;
use crate::internal;
use crate::other_hosts::MOVED;
use crate::peer::Peer;
use crate::preview_link::take_link;
use crate::request_body::ClientRequestBody;
use crate::request_error::RequestError;
use crate::request_id::RequestId;
use crate::response_body::{BodyUntil, ClientResponseBody};
use crate::route::{Addressing, SandboxTarget, only};
use crate::sandboxes::{SandboxAccess, Sandboxes};
use crate::tasks::ConnectionTasks;
use crate::tunnel;
use http_body_util::BodyExt;
use hyper::header::{COOKIE, HeaderValue, LOCATION, SET_COOKIE};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode, Version};
use jiffy_http::PooledBody;
use jiffy_proto::agent::ENVD_PORT;
use jiffy_proto::internal::InternalOrigin;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use subtle::ConstantTimeEq;
use tracing::Instrument;

/// `Set-Cookie` header of the response, if any.
type Cookie = Option<HeaderValue>;

/// Context of a client's request, apart from head and body.
pub(crate) struct RequestContext {
    pub(crate) peer: Peer,
    /// Function or sandbox whose internal connection carried the request. `None` for other clients.
    pub(crate) origin: Option<Arc<InternalOrigin>>,
    pub(crate) request_id: RequestId,
    pub(crate) upgrade: hyper::upgrade::OnUpgrade,
    pub(crate) tasks: ConnectionTasks,
    /// True if another host of the fleet forwarded the request.
    pub(crate) is_forwarded: bool,
}

impl<S: Sandboxes> GatewayState<S> {
    /// Forwards a request to a guest, and returns the response for the client.
    pub(crate) async fn pass(
        &self,
        target: SandboxTarget,
        parts: Parts,
        mut body: ClientRequestBody,
        context: RequestContext,
    ) -> Result<Response<Body>, RequestError> {
        // The check applies to all forms of addressing, including internal connections.
        if u32::from(target.port) == ENVD_PORT && is_host_only(target.path.path()) {
            return Err(RequestError::HostOnly);
        }
        let Some(access) = self.sandboxes.find(&target.id) else {
            return match &self.hosts {
                Some(_) if context.is_forwarded => Err(RequestError::Moved),
                // Internal connections, which functions use, reach sandboxes of their own host
                // only.
                Some(hosts) if context.origin.is_none() => {
                    self.forward(hosts, &target.id, parts, body, context).await
                }
                _ => Err(RequestError::NotFound),
            };
        };
        let origin = context.origin.as_deref();
        if origin.is_some_and(|origin| !internal::reaches(origin, &access)) {
            // Respond as if the sandbox did not exist, so that its existence is not revealed.
            return Err(RequestError::NotFound);
        }
        let pending = self.guest_calls.as_ref().and_then(|log| {
            PendingGuestCall::begin(log, &context, (&target, &access), &parts, &mut body)
        });
        let result = self.exchange(target, parts, body, context, access).await;
        if let Some(pending) = pending {
            let status = match &result {
                Ok(answer) => answer.status(),
                Err(error) => error.status(),
            };
            pending.complete(status.as_u16());
        }
        result
    }

    /// Forwards a request to a guest of this host.
    async fn exchange(
        &self,
        mut target: SandboxTarget,
        mut parts: Parts,
        body: ClientRequestBody,
        context: RequestContext,
        access: SandboxAccess,
    ) -> Result<Response<Body>, RequestError> {
        let protocol = upgrade(parts.version, &parts.headers);
        // Redirect before `admit` removes the parameters of a signed link: the new URL needs them.
        if protocol.is_none()
            && let Some(redirect) = slash_redirect(&target, &parts)
        {
            return Ok(redirect);
        }
        let (cookie, linked) = self.admit(&mut target, &parts, &access, context.peer.tls)?;
        // A stream that was opened with a signed link is closed when the link is revoked.
        let mut end = linked.then(|| {
            let (sandboxes, id) = (self.sandboxes.clone(), target.id.clone());
            Box::pin(async move { sandboxes.links_revoked(&id).await })
        });
        // The permit counts the exchange for the owner of the sandbox, until the response ends.
        let permit = self
            .sandboxes
            .begin(&access)
            .map_err(RequestError::ExchangeLimit)?;
        let max_exchanges = self.config.limits.exchanges;
        let mut in_flight = InFlightExchange::begin(&self.counters, max_exchanges, permit)
            .ok_or(RequestError::Overloaded)?;
        if access.counts_uses {
            in_flight.set_use(self.sandboxes.begin_use(&target.id, target.port));
        }
        let host = requested_host(&parts);
        let rewrite = HeaderRewrite {
            peer: context.peer,
            request_id: &context.request_id,
            target: &target,
            host: &host,
            access: &access,
            config: &self.config,
        };
        rewrite.to_guest(&mut parts);
        let port = target.port;
        let tls = access.https_ports.contains(&port).then(|| {
            let masked = access.mask_request_host.as_deref().unwrap_or_default();
            masked.replace("${PORT}", &port.to_string())
        });
        let upstream = Upstream::guest(target.id.clone(), port, tls);
        // An upgraded connection cannot be shared, so an upgrade uses a new connection.
        let sending = exchange::send(self, &upstream, parts, body, protocol.is_some());
        let (mut answer, connection) = match &mut end {
            None => sending.await?,
            Some(end) => tokio::select! {
                sent = sending => sent?,
                () = end => return Err(RequestError::Link),
            },
        };
        add(&self.counters.answered, 1);
        let switched = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
        let upgraded = match (&protocol, answer.headers().get(hyper::header::UPGRADE)) {
            (Some(_), Some(agreed)) if switched => Some(agreed.clone()),
            // Without a requested and confirmed upgrade, the response is invalid: the client would
            // misinterpret later bytes.
            _ if switched => {
                return Err(RequestError::Unavailable(
                    "it switched to a protocol that was not requested".to_owned(),
                ));
            }
            _ => None,
        };
        let guest = upgraded.is_some().then(|| hyper::upgrade::on(&mut answer));
        let (mut head, incoming) = answer.into_parts();
        // hyper adapts the version to the client's connection.
        head.version = Version::HTTP_11;
        rewrite.to_client(&mut head.headers, upgraded);
        if context.is_forwarded {
            // Only the gateway may report that a sandbox has moved.
            head.headers.remove(MOVED);
        }
        if let Some(cookie) = cookie {
            head.headers.append(SET_COOKIE, cookie);
        }
        let Some(guest) = guest else {
            let body = PooledBody::new(incoming, Arc::clone(&self.pool.idle), connection);
            let body = ClientResponseBody::new(body, Arc::clone(&self.counters), in_flight);
            let body = body.boxed_unsync();
            let body = match end {
                None => body,
                Some(end) => BodyUntil::new(body, end).boxed_unsync(),
            };
            return Ok(Response::from_parts(head, body));
        };
        let (counters, half_closed) = (Arc::clone(&self.counters), self.config.limits.half_closed);
        // Only the traffic of the stream counts as use.
        in_flight.end_use();
        // The stream outlives this request: it runs until both sides are done or the link is
        // revoked.
        let stream = async move {
            if let (Ok(client), Ok(guest)) = tokio::join!(context.upgrade, guest) {
                add(&counters.upgraded, 1);
                let joined = tunnel::join(client, guest, &counters, half_closed);
                match end {
                    None => joined.await,
                    Some(end) => tokio::select! {
                        () = joined => {}
                        () = end => {}
                    },
                }
            }
            // Hold the connection and the permits until the stream ends.
            drop((connection, in_flight));
        };
        context.tasks.spawn(stream.in_current_span());
        Ok(Response::from_parts(head, full("")))
    }

    /// Checks that the client has access, and removes the parameters of a signed link from the
    /// query. Returns the cookie that represents the link, and true if the client used a link.
    /// `tls` states whether the client uses TLS.
    fn admit(
        &self,
        target: &mut SandboxTarget,
        parts: &Parts,
        access: &SandboxAccess,
        tls: bool,
    ) -> Result<(Cookie, bool), RequestError> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            // With a clock before 1970, all links have expired.
            .map_or(u64::MAX, |since| since.as_secs());
        let (id, port) = (&target.id, target.port);
        let by_path = |expires: &str, signature: &str| {
            // Links are revoked together with the API key of the sandbox.
            let signer = self.signer.as_ref().filter(|_| !access.links_revoked)?;
            signer.verify_path_link(id, port, expires, signature, now)
        };
        let mut cookie = None;
        let linked = match &target.addressing {
            Addressing::Headers | Addressing::Host(None) => false,
            Addressing::Host(Some((expires, signature))) => {
                let signer = self.signer.as_ref().ok_or(RequestError::Link)?;
                let opens = signer.verify_host_link(id, port, expires, signature, now);
                if !opens || access.links_revoked {
                    return Err(RequestError::Link);
                }
                true
            }
            Addressing::Path(prefix) => match take_link(&target.path) {
                Some((path, expires, signature)) => {
                    let until = by_path(&expires, &signature).ok_or(RequestError::Link)?;
                    let secure = if tls { "; Secure" } else { "" };
                    let text = format!(
                        "{}link_{port}={until}.{signature}; Path={prefix}; Max-Age={}; HttpOnly; SameSite=Lax{secure}",
                        jiffy_http::headers::set_cookie::RESERVED_PREFIX,
                        until.saturating_sub(now),
                    );
                    cookie = HeaderValue::from_str(&text).ok();
                    target.path = path;
                    true
                }
                // Without a link in the query, a cookie of an earlier request may contain it.
                None => {
                    let name = format!(
                        "{}link_{port}",
                        jiffy_http::headers::set_cookie::RESERVED_PREFIX
                    );
                    jiffy_http::headers::set_cookie::values_of(
                        parts.headers.get_all(COOKIE).iter(),
                        &name,
                    )
                    .filter_map(|value| value.split_once('.'))
                    // Several cookies may have this name, for example of an earlier link.
                    .any(|(expires, signature)| by_path(expires, signature).is_some())
                }
            },
        };
        // The agent checks its own token.
        let public = u32::from(port) == ENVD_PORT || linked;
        match &access.traffic_token {
            Some(token) if !public => {
                let given = only(&parts.headers, TRAFFIC_TOKEN)
                    .map_err(|()| RequestError::Token)?
                    .ok_or(RequestError::Token)?;
                // Compare in constant time.
                if bool::from(given.as_bytes().ct_eq(token.as_bytes())) {
                    Ok((cookie, linked))
                } else {
                    Err(RequestError::Token)
                }
            }
            _ => Ok((cookie, linked)),
        }
    }
}

/// Redirects `/sandboxes/{id}/proxy/{port}` to the same path with a trailing slash, so that
/// relative URLs lead to the guest.
fn slash_redirect(target: &SandboxTarget, parts: &Parts) -> Option<Response<Body>> {
    let Addressing::Path(prefix) = &target.addressing else {
        return None;
    };
    let plain = matches!(parts.method, Method::GET | Method::HEAD);
    if !plain || parts.uri.path() != prefix {
        return None;
    }
    let location = HeaderValue::from_str(&format!("{prefix}{}", target.path)).ok()?;
    let mut answer = Response::new(full(""));
    *answer.status_mut() = StatusCode::PERMANENT_REDIRECT;
    answer.headers_mut().insert(LOCATION, location);
    Some(answer)
}
