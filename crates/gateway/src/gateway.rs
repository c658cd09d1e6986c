//! Dispatch of requests to the control plane and to sandboxes.

use crate::activity::InFlightRequest;
use crate::admission::ConnectionAdmission;
use crate::body::{Body, full};
use crate::config::GatewayConfig;
use crate::control_plane::ControlPlane;
use crate::counters::{GatewayCounters, add};
use crate::exchange;
use crate::file_link::FileLink;
use crate::headers::{HeaderRewrite, TRAFFIC_TOKEN, requested_host, upgrade};
use crate::host_only_path::is_host_only;
use crate::in_flight_exchange::InFlightExchange;
use crate::internal;
use crate::peer::{KnownCaller, Peer};
use crate::pool::GuestConnectionPool;
use crate::preview_link::{LinkSigner, take_link};
use crate::request_body::ClientRequestBody;
use crate::request_error::{FailedTarget, RequestError, wants_page};
use crate::request_id::{RequestId, X_REQUEST_ID};
use crate::response_body::{BodyUntil, ClientResponseBody};
use crate::route::{Addressing, FunctionLabel, Route, SandboxTarget, only, route};
use crate::sandboxes::{OpenError, SandboxAccess, Sandboxes};
use crate::state::GatewayState;
use crate::tasks::ConnectionTasks;
use crate::tunnel;
use http_body_util::BodyExt;
use hyper::header::{CONNECTION, COOKIE, HeaderValue, LOCATION, ORIGIN, SET_COOKIE};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Version};
use jiffy_http::PooledBody;
use jiffy_proto::agent::ENVD_PORT;
use jiffy_proto::internal::InternalOrigin;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use subtle::ConstantTimeEq;
use tokio::time::timeout;
use tracing::{Instrument, Span, debug, field, info_span};

/// TCP port of the agent in the guest.
const AGENT_PORT: u16 = 49_983;
const _: () = assert!(AGENT_PORT as u32 == ENVD_PORT);

/// Dispatches requests to the control plane and to sandboxes. Clones share their state.
#[derive(Debug)]
pub struct Gateway<S, C> {
    pub(crate) shared: Arc<GatewayState<S>>,
    control: C,
    /// Peer of an internal connection. `None` for clients' connections.
    origin: Option<Arc<InternalOrigin>>,
}

impl<S, C: Clone> Clone for Gateway<S, C> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            control: self.control.clone(),
            origin: self.origin.clone(),
        }
    }
}

/// Cookie to set in the response.
type Cookie = Option<HeaderValue>;

impl<S: Sandboxes, C: ControlPlane> Gateway<S, C> {
    /// Creates a gateway. `control` answers requests without a sandbox. `None` for `signer`
    /// disables signed links.
    pub fn new(
        config: GatewayConfig,
        sandboxes: S,
        control: C,
        signer: Option<LinkSigner>,
    ) -> Self {
        let counters = Arc::new(GatewayCounters::default());
        let admission = ConnectionAdmission::new(&config.limits, Arc::clone(&counters));
        Self {
            shared: Arc::new(GatewayState {
                config,
                sandboxes,
                signer,
                counters,
                pool: Arc::new(GuestConnectionPool::default()),
                admission: Arc::new(admission),
            }),
            control,
            origin: None,
        }
    }

    /// Returns a gateway for an internal connection of `origin`.
    pub(crate) fn within(&self, origin: InternalOrigin) -> Self {
        Self {
            origin: Some(Arc::new(origin)),
            ..self.clone()
        }
    }

    /// Returns the connection limits, for another listener that shares them.
    #[must_use]
    pub fn admission(&self) -> Arc<ConnectionAdmission> {
        Arc::clone(&self.shared.admission)
    }

    /// Returns the counters of requests and connections.
    #[must_use]
    pub fn counters(&self) -> Arc<GatewayCounters> {
        Arc::clone(&self.shared.counters)
    }

    /// Returns the pool of connections into guests. Call [`GuestConnectionPool::invalidate`] when a
    /// sandbox is paused, rolled back or killed.
    #[must_use]
    pub fn pool(&self) -> Arc<GuestConnectionPool> {
        Arc::clone(&self.shared.pool)
    }

    /// Answers one request.
    pub(crate) async fn handle(
        mut self,
        mut request: Request<ClientRequestBody>,
        peer: Peer,
        tasks: ConnectionTasks,
        in_flight: &InFlightRequest,
    ) -> Response<Body> {
        let id = RequestId::of(request.headers());
        let span = info_span!(
            "request",
            id = id.as_str(),
            method = request.method().as_str(),
            client = %peer.ip,
            sandbox = field::Empty,
            port = field::Empty,
        );
        let name = id.value();
        let work = async move {
            let upgrade = hyper::upgrade::on(&mut request);
            let (parts, body) = request.into_parts();
            let route = match &self.origin {
                None => self.shared.decide(&parts),
                Some(origin) => internal::decide(origin, &parts),
            };
            match route {
                route @ (Route::ControlPlane | Route::Function(_)) => {
                    let mut request = Request::from_parts(parts, body);
                    request
                        .headers_mut()
                        .insert(X_REQUEST_ID.clone(), id.value());
                    request.extensions_mut().insert(id);
                    request.extensions_mut().insert(peer);
                    if let Some(origin) = &self.origin {
                        let origin = InternalOrigin::clone(origin);
                        request.extensions_mut().insert(origin);
                    }
                    if let Route::Function(label) = route {
                        request.extensions_mut().insert(FunctionLabel(label));
                    }
                    // Allows the control plane to upgrade the connection.
                    request.extensions_mut().insert(upgrade);
                    add(&self.shared.counters.control_plane, 1);
                    let answer = self.control.answer(request).await;
                    if answer.extensions().get::<KnownCaller>().is_some() {
                        in_flight.mark_known();
                    }
                    answer
                }
                Route::Refused(status, reason) => {
                    let failure = RequestError::Refused(status, reason);
                    self.shared.failed(&failure);
                    let mut answer = failure.answer(None, wants_page(&parts.headers));
                    // The error may be in the request's framing, so the connection cannot be
                    // reused.
                    if parts.version < Version::HTTP_2 {
                        let close = HeaderValue::from_static("close");
                        answer.headers_mut().insert(CONNECTION, close);
                    }
                    answer
                }
                Route::Sandbox(target) => {
                    in_flight.close_on_eof();
                    let span = Span::current();
                    span.record("sandbox", &target.id);
                    span.record("port", target.port);
                    let page =
                        target.addressing != Addressing::Headers && wants_page(&parts.headers);
                    let (sandbox, port) = (target.id.clone(), target.port);
                    let context = RequestContext {
                        peer,
                        origin: self.origin.clone(),
                        request_id: id,
                        upgrade,
                        tasks,
                    };
                    match self.shared.pass(target, parts, body, context).await {
                        Ok(answer) => {
                            in_flight.mark_known();
                            answer
                        }
                        Err(failure) => {
                            let failure = self.shared.with_cause(failure, &sandbox).await;
                            self.shared.failed(&failure);
                            let about = FailedTarget { id: &sandbox, port };
                            failure.answer(Some(about), page)
                        }
                    }
                }
            }
        };
        let mut answer = work.instrument(span).await;
        // A function's request has its own id, independent of the client's.
        let name = answer
            .extensions()
            .get::<RequestId>()
            .map_or(name, RequestId::value);
        answer.headers_mut().insert(X_REQUEST_ID.clone(), name);
        answer
    }
}

/// Context of a client's request, apart from head and body.
struct RequestContext {
    peer: Peer,
    origin: Option<Arc<InternalOrigin>>,
    request_id: RequestId,
    upgrade: hyper::upgrade::OnUpgrade,
    tasks: ConnectionTasks,
}

impl<S: Sandboxes> GatewayState<S> {
    /// Routes a request. Isolated pages of guests send `Origin: null` with cross-origin requests,
    /// which must not reach the control plane.
    fn decide(&self, parts: &Parts) -> Route {
        match route(parts, &self.config) {
            Route::ControlPlane
                if self.config.isolate_paths
                    && parts.headers.get(ORIGIN).is_some_and(|o| o == "null") =>
            {
                Route::Refused(
                    StatusCode::FORBIDDEN,
                    "Pages without an origin may not call the control plane",
                )
            }
            Route::ControlPlane => self.route_file_link(parts),
            route => route,
        }
    }

    /// Routes a request without a sandbox: a signed link to a file leads to the sandbox whose token
    /// signed it.
    fn route_file_link(&self, parts: &Parts) -> Route {
        let Some(link) = FileLink::of(parts) else {
            return Route::ControlPlane;
        };
        let id = self
            .sandboxes
            .find_by_token(|token| link.is_signed_with(token));
        match (id, parts.uri.path_and_query()) {
            (Some(id), Some(path)) => Route::Sandbox(SandboxTarget {
                id,
                port: AGENT_PORT,
                path: path.clone(),
                addressing: Addressing::Headers,
            }),
            _ => Route::Refused(
                StatusCode::UNAUTHORIZED,
                "The signature matches no sandbox on this server: request a new link",
            ),
        }
    }

    /// Replaces the error of an interrupted exchange by its cause, if the sandbox was killed or
    /// paused.
    async fn with_cause(&self, failure: RequestError, id: &str) -> RequestError {
        if !matches!(failure, RequestError::Unavailable(_)) {
            return failure;
        }
        let why = timeout(self.config.limits.open, self.sandboxes.why_gone(id)).await;
        match why {
            Ok(Some(OpenError::NotFound)) => RequestError::NotFound,
            Ok(Some(OpenError::NotRunning)) => RequestError::NotRunning,
            _ => failure,
        }
    }

    fn failed(&self, failure: &RequestError) {
        debug!(%failure, "rejected a request");
        let counters = &self.counters;
        let counter = match failure {
            RequestError::Refused(..) => &counters.refused,
            RequestError::HostOnly | RequestError::Token | RequestError::Link => {
                &counters.forbidden
            }
            RequestError::NotFound | RequestError::NotRunning => &counters.not_found,
            RequestError::PortClosed => &counters.port_closed,
            RequestError::Unavailable(_) => &counters.unavailable,
            RequestError::Limit(_)
            | RequestError::ExchangeLimit(_)
            | RequestError::Busy
            | RequestError::Overloaded => &counters.limited,
        };
        add(counter, 1);
    }

    /// Passes a request to a guest, and the response to the client.
    async fn pass(
        &self,
        mut target: SandboxTarget,
        mut parts: Parts,
        body: ClientRequestBody,
        context: RequestContext,
    ) -> Result<Response<Body>, RequestError> {
        // Checked for all forms of addressing, including internal connections.
        if u32::from(target.port) == ENVD_PORT && is_host_only(target.path.path()) {
            return Err(RequestError::HostOnly);
        }
        let access = self
            .sandboxes
            .find(&target.id)
            .ok_or(RequestError::NotFound)?;
        let origin = context.origin.as_deref();
        if origin.is_some_and(|origin| !internal::reaches(origin, &access)) {
            return Err(RequestError::NotFound);
        }
        let protocol = upgrade(parts.version, &parts.headers);
        if protocol.is_none()
            && let Some(redirect) = with_slash(&target, &parts)
        {
            return Ok(redirect);
        }
        let (cookie, linked) = self.admit(&mut target, &parts, &access, context.peer.tls)?;
        // A stream that was opened with a signed link is closed when the link is revoked.
        let mut end = linked.then(|| {
            let (sandboxes, id) = (self.sandboxes.clone(), target.id.clone());
            Box::pin(async move { sandboxes.links_closed(&id).await })
        });
        let permit = self
            .sandboxes
            .begin(&access)
            .map_err(RequestError::ExchangeLimit)?;
        let max_exchanges = self.config.limits.exchanges;
        let in_flight = InFlightExchange::begin(&self.counters, max_exchanges, permit)
            .ok_or(RequestError::Overloaded)?;
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
        let key = (target.id.clone(), target.port);
        let sending = exchange::send(self, &key, parts, body, protocol.is_some());
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
            _ if switched => {
                return Err(RequestError::Unavailable(
                    "it switched to a protocol that was not requested".to_owned(),
                ));
            }
            _ => None,
        };
        let guest = upgraded.is_some().then(|| hyper::upgrade::on(&mut answer));
        let (mut head, incoming) = answer.into_parts();
        head.version = Version::HTTP_11;
        rewrite.to_client(&mut head.headers, upgraded);
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
    fn admit(
        &self,
        target: &mut SandboxTarget,
        parts: &Parts,
        access: &SandboxAccess,
        tls: bool,
    ) -> Result<(Cookie, bool), RequestError> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(u64::MAX, |since| since.as_secs());
        let (id, port) = (&target.id, target.port);
        let by_path = |expires: &str, signature: &str| {
            let signer = self.signer.as_ref().filter(|_| !access.links_closed)?;
            signer.opens_path(id, port, expires, signature, now)
        };
        let mut cookie = None;
        let linked = match &target.addressing {
            Addressing::Headers | Addressing::Host(None) => false,
            Addressing::Host(Some((expires, signature))) => {
                let signer = self.signer.as_ref().ok_or(RequestError::Link)?;
                let opens = signer.opens_label(id, port, expires, signature, now);
                if !opens || access.links_closed {
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
                    .any(|(expires, signature)| by_path(expires, signature).is_some())
                }
            },
        };
        // The agent checks its own token.
        let public = u32::from(port) == ENVD_PORT || linked;
        match &access.traffic_token {
            Some(token) if !public => {
                let given = only(&parts.headers, TRAFFIC_TOKEN);
                let given = given
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
fn with_slash(target: &SandboxTarget, parts: &Parts) -> Option<Response<Body>> {
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
