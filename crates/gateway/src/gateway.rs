//! [`Gateway`]: dispatches each request of a client to the control plane, to a sandbox of this host
//! or to another host.
//!
//! The gateway is the HTTP entry of a host. The control plane is the API of the daemon, which
//! manages sandboxes. All other requests go to a port of a sandbox, or to a function.

use crate::activity::InFlightRequest;
use crate::admission::ConnectionAdmission;
use crate::body::Body;
use crate::config::GatewayConfig;
use crate::control_plane::ControlPlane;
use crate::counters::{GatewayCounters, add};
use crate::guest_calls::GuestCallLog;
use crate::guest_tls::GuestTls;
use crate::internal;
use crate::other_hosts::OtherHosts;
use crate::peer::{KnownCaller, Peer};
use crate::pool::GuestConnectionPool;
use crate::preview_link::LinkSigner;
use crate::request_body::ClientRequestBody;
use crate::request_error::{FailedTarget, RequestError, wants_page};
use crate::request_id::{RequestId, X_REQUEST_ID};
use crate::route::{Addressing, FunctionLabel, Route};
use crate::sandboxes::Sandboxes;
use crate::state::{GatewayState, RequestContext};
use crate::tasks::ConnectionTasks;
use hyper::header::{CONNECTION, HeaderValue};
use hyper::{Request, Response, StatusCode, Version};
use jiffy_proto::internal::InternalOrigin;
use std::sync::Arc;
use tracing::{Instrument, Span, field, info_span};

/// Dispatches requests to the control plane and to sandboxes. Each request is handled on a clone;
/// clones share their state.
#[derive(Debug)]
pub struct Gateway<S, C> {
    pub(crate) shared: Arc<GatewayState<S>>,
    control: C,
    /// Origin of an internal connection, which a function or sandbox opened. `None` for connections
    /// of clients.
    origin: Option<Arc<InternalOrigin>>,
    /// True for connections of other hosts, whose requests are not forwarded again.
    is_forwarded: bool,
}

impl<S, C: Clone> Clone for Gateway<S, C> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            control: self.control.clone(),
            origin: self.origin.clone(),
            is_forwarded: self.is_forwarded,
        }
    }
}

impl<S: Sandboxes, C: ControlPlane> Gateway<S, C> {
    /// Creates a gateway. `control` answers requests without a sandbox. `None` for `signer`
    /// disables signed links.
    pub fn new(
        config: GatewayConfig,
        sandboxes: S,
        control: C,
        signer: Option<LinkSigner>,
    ) -> Self {
        Self::in_fleet(config, sandboxes, control, signer, None, None)
    }

    /// Like [`Self::new`]. Forwards requests to sandboxes of the hosts `hosts`, and records calls
    /// to agents in `guest_calls`.
    pub fn in_fleet(
        config: GatewayConfig,
        sandboxes: S,
        control: C,
        signer: Option<LinkSigner>,
        hosts: Option<Arc<dyn OtherHosts>>,
        guest_calls: Option<Arc<dyn GuestCallLog>>,
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
                guest_tls: GuestTls::new(),
                hosts,
                host_pool: Arc::new(GuestConnectionPool::default()),
                admission: Arc::new(admission),
                guest_calls,
            }),
            control,
            origin: None,
            is_forwarded: false,
        }
    }

    /// Returns a gateway for connections of other hosts.
    pub(crate) fn for_forwarded(&self) -> Self {
        Self {
            is_forwarded: true,
            ..self.clone()
        }
    }

    /// Returns a gateway for an internal connection of `origin`.
    pub(crate) fn for_internal(&self, origin: InternalOrigin) -> Self {
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

    /// Answers one request: decides its route, lets the control plane or the guest answer it, and
    /// adds the id of the request to the response.
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
            // Clients and internal connections are routed by different rules.
            let route = match &self.origin {
                None if self.is_forwarded => match self.shared.decide(&parts) {
                    route @ (Route::Sandbox(_) | Route::Refused(..)) => route,
                    // The host that forwarded the request answers such requests itself.
                    Route::ControlPlane | Route::Function(_) => Route::Refused(
                        StatusCode::MISDIRECTED_REQUEST,
                        "Hosts forward requests to sandboxes only",
                    ),
                },
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
                    // Lets the control plane upgrade the connection.
                    request.extensions_mut().insert(upgrade);
                    add(&self.shared.counters.control_plane, 1);
                    let answer = self.control.answer(request).await;
                    // The control plane knows the caller: the connection no longer counts as one of
                    // an unknown client.
                    if answer.extensions().get::<KnownCaller>().is_some() {
                        in_flight.mark_known();
                    }
                    answer
                }
                Route::Refused(status, reason) => {
                    let failure = RequestError::Refused(status, reason);
                    self.shared.record_failure(&failure);
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
                    // The guest may take any time: a client that closes its side is considered
                    // disconnected.
                    in_flight.close_on_eof();
                    let span = Span::current();
                    span.record("sandbox", &target.id);
                    span.record("port", target.port);
                    let page =
                        // Requests with headers come from SDKs, which parse JSON.
                        target.addressing != Addressing::Headers && wants_page(&parts.headers);
                    let (sandbox, port) = (target.id.clone(), target.port);
                    let context = RequestContext {
                        peer,
                        origin: self.origin.clone(),
                        request_id: id,
                        upgrade,
                        tasks,
                        is_forwarded: self.is_forwarded,
                    };
                    match self.shared.pass(target, parts, body, context).await {
                        Ok(answer) => {
                            // A client that reached a sandbox is no longer unknown.
                            in_flight.mark_known();
                            answer
                        }
                        Err(failure) => {
                            // An interrupted connection often means that the sandbox has just been
                            // paused or killed.
                            let failure = self.shared.with_cause(failure, &sandbox).await;
                            self.shared.record_failure(&failure);
                            let about = FailedTarget { id: &sandbox, port };
                            failure.answer(Some(about), page)
                        }
                    }
                }
            }
        };
        let mut answer = work.instrument(span).await;
        // The control plane gives the request of a function an id of its own, independent of the
        // client's id.
        let name = answer
            .extensions()
            .get::<RequestId>()
            .map_or(name, RequestId::value);
        answer.headers_mut().insert(X_REQUEST_ID.clone(), name);
        answer
    }
}
