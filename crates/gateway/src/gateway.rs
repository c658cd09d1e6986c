//! Takes each request to whom it is for.

use crate::admission::Admission;
use crate::answer::{About, Failure, wants_page};
use crate::body::{Body, BoxError, FromClient, ToClient, Until, full};
use crate::config::Config;
use crate::connection::Turn;
use crate::counters::{Counters, add};
use crate::exchange::{self, Underway};
use crate::file_link::FileLink;
use crate::headers::{Passage, TRAFFIC_TOKEN, host_written, upgrade};
use crate::link::{Signer, take_link};
use crate::listener::Tasks;
use crate::pool::Pool;
use crate::private_path::is_host_only;
use crate::request_id::{RequestId, X_REQUEST_ID};
use crate::route::{How, Route, Target, only, route};
use crate::sandboxes::{Access, OpenError, Sandboxes};
use crate::set_cookie;
use crate::tunnel;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::header::{CONNECTION, COOKIE, HeaderValue, LOCATION, ORIGIN, SET_COOKIE};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Version};
use jiffy_proto::agent::ENVD_PORT;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use subtle::ConstantTimeEq;
use tokio::time::timeout;
use tower_service::Service;
use tracing::{Instrument, Span, debug, field, info_span};

/// The agent's TCP port in the guest.
const AGENT_PORT: u16 = 49_983;
const _: () = assert!(AGENT_PORT as u32 == ENVD_PORT);

/// Who is at the other end of a client's connection. The control plane finds it among a request's extensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Address it comes from.
    pub ip: IpAddr,
    /// Whether it came over TLS.
    pub tls: bool,
    /// Whether it came over a Unix socket, which only its owner can open.
    pub local: bool,
}

/// Mark that the control plane puts among the extensions of an answer to a caller it knows. The
/// connection may then stay open as long as those of clients do; others are bounded in number and
/// closed soon when nothing happens on them.
#[derive(Debug, Clone, Copy)]
pub struct KnownCaller;

/// Who answers what is for no sandbox. Every `tower` service of requests is one; an `axum` router, say.
pub trait ControlPlane: Clone + Send + 'static {
    /// Answers.
    fn answer(
        &mut self,
        request: Request<FromClient>,
    ) -> impl Future<Output = Response<Body>> + Send;
}

impl<T, B> ControlPlane for T
where
    T: Service<Request<FromClient>, Response = Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    T::Future: Send,
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    async fn answer(&mut self, request: Request<FromClient>) -> Response<Body> {
        let Ok(()) = poll_fn(|cx| self.poll_ready(cx)).await;
        let Ok(answer) = self.call(request).await;
        answer.map(|body| body.map_err(Into::into).boxed_unsync())
    }
}

/// What all connections share.
#[derive(Debug)]
pub(crate) struct Shared<S> {
    pub(crate) config: Config,
    pub(crate) sandboxes: S,
    pub(crate) signer: Option<Signer>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) admission: Arc<Admission>,
}

/// Takes each request to whom it is for. Clones are the same gateway.
#[derive(Debug)]
pub struct Gateway<S, C> {
    pub(crate) shared: Arc<Shared<S>>,
    control: C,
}

impl<S, C: Clone> Clone for Gateway<S, C> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            control: self.control.clone(),
        }
    }
}

/// A cookie that the answer must set.
type Cookie = Option<HeaderValue>;

impl<S: Sandboxes, C: ControlPlane> Gateway<S, C> {
    /// `control` answers what is for no sandbox. Without `signer` there are no signed links.
    pub fn new(config: Config, sandboxes: S, control: C, signer: Option<Signer>) -> Self {
        let counters = Arc::new(Counters::default());
        let admission = Admission::new(&config.limits, Arc::clone(&counters));
        Self {
            shared: Arc::new(Shared {
                config,
                sandboxes,
                signer,
                counters,
                pool: Arc::new(Pool::default()),
                admission: Arc::new(admission),
            }),
            control,
        }
    }

    /// What was done so far.
    #[must_use]
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.shared.counters)
    }

    /// The connections into guests; call [`Pool::forget`] when a sandbox is paused, rolled back or killed.
    #[must_use]
    pub fn pool(&self) -> Arc<Pool> {
        Arc::clone(&self.shared.pool)
    }

    /// Answers one request.
    pub(crate) async fn handle(
        mut self,
        mut request: Request<FromClient>,
        peer: Peer,
        tasks: Tasks,
        turn: &Turn,
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
            match self.shared.decide(&parts) {
                Route::ControlPlane => {
                    let mut request = Request::from_parts(parts, body);
                    request
                        .headers_mut()
                        .insert(X_REQUEST_ID.clone(), id.value());
                    request.extensions_mut().insert(id);
                    request.extensions_mut().insert(peer);
                    // So that the control plane can upgrade, as the gateway can.
                    request.extensions_mut().insert(upgrade);
                    add(&self.shared.counters.control_plane, 1);
                    let answer = self.control.answer(request).await;
                    if answer.extensions().get::<KnownCaller>().is_some() {
                        turn.is_known();
                    }
                    answer
                }
                Route::Refused(status, reason) => {
                    let failure = Failure::Refused(status, reason);
                    self.shared.failed(&failure);
                    let mut answer = failure.answer(None, wants_page(&parts.headers));
                    // Where one request ends and the next begins may be what is wrong.
                    if parts.version < Version::HTTP_2 {
                        let close = HeaderValue::from_static("close");
                        answer.headers_mut().insert(CONNECTION, close);
                    }
                    answer
                }
                Route::Sandbox(target) => {
                    turn.takes_long();
                    let span = Span::current();
                    span.record("sandbox", &target.id);
                    span.record("port", target.port);
                    let page = target.how != How::Headers && wants_page(&parts.headers);
                    let (sandbox, port) = (target.id.clone(), target.port);
                    let visit = Visit {
                        peer,
                        request_id: id,
                        upgrade,
                        tasks,
                    };
                    match self.shared.pass(target, parts, body, visit).await {
                        Ok(answer) => {
                            turn.is_known();
                            answer
                        }
                        Err(failure) => {
                            let failure = self.shared.explained(failure, &sandbox).await;
                            self.shared.failed(&failure);
                            let about = About { id: &sandbox, port };
                            failure.answer(Some(about), page)
                        }
                    }
                }
            }
        };
        let mut answer = work.instrument(span).await;
        answer.headers_mut().insert(X_REQUEST_ID.clone(), name);
        answer
    }
}

/// A client's request besides its head and body.
struct Visit {
    peer: Peer,
    request_id: RequestId,
    upgrade: hyper::upgrade::OnUpgrade,
    tasks: Tasks,
}

impl<S: Sandboxes> Shared<S> {
    /// Whose a request is. Pages of guests that were isolated say `Origin: null` when they ask for more than they could read anyway.
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
            Route::ControlPlane => self.route_of_file(parts),
            route => route,
        }
    }

    /// Where a request that names no sandbox goes: a signed link to a file leads to the sandbox that signed it.
    fn route_of_file(&self, parts: &Parts) -> Route {
        let Some(link) = FileLink::of(parts) else {
            return Route::ControlPlane;
        };
        let id = self
            .sandboxes
            .find_by_token(|token| link.is_signed_with(token));
        match (id, parts.uri.path_and_query()) {
            (Some(id), Some(path)) => Route::Sandbox(Target {
                id,
                port: AGENT_PORT,
                path: path.clone(),
                how: How::Headers,
            }),
            _ => Route::Refused(
                StatusCode::UNAUTHORIZED,
                "The signature fits no file of a sandbox here: ask for a new link",
            ),
        }
    }

    /// What to tell about a sandbox that broke off: that it was killed or put to sleep meanwhile, if that is why.
    async fn explained(&self, failure: Failure, id: &str) -> Failure {
        if !matches!(failure, Failure::Unavailable(_)) {
            return failure;
        }
        let why = timeout(self.config.limits.open, self.sandboxes.why_gone(id)).await;
        match why {
            Ok(Some(OpenError::NotFound)) => Failure::NotFound,
            Ok(Some(OpenError::NotRunning)) => Failure::NotRunning,
            _ => failure,
        }
    }

    fn failed(&self, failure: &Failure) {
        debug!(%failure, "not passed on");
        let counters = &self.counters;
        let counter = match failure {
            Failure::Refused(..) => &counters.refused,
            Failure::HostOnly | Failure::Token | Failure::Link => &counters.forbidden,
            Failure::NotFound | Failure::NotRunning => &counters.not_found,
            Failure::PortClosed => &counters.port_closed,
            Failure::Unavailable(_) => &counters.unavailable,
            Failure::Limit(_) | Failure::ExchangeLimit(_) | Failure::Busy | Failure::Overloaded => {
                &counters.limited
            }
        };
        add(counter, 1);
    }

    /// Passes a request to a guest, and the answer back.
    async fn pass(
        &self,
        mut target: Target,
        mut parts: Parts,
        body: FromClient,
        visit: Visit,
    ) -> Result<Response<Body>, Failure> {
        if u32::from(target.port) == ENVD_PORT && is_host_only(target.path.path()) {
            return Err(Failure::HostOnly);
        }
        let access = self.sandboxes.find(&target.id).ok_or(Failure::NotFound)?;
        let protocol = upgrade(parts.version, &parts.headers);
        if protocol.is_none()
            && let Some(redirect) = with_slash(&target, &parts)
        {
            return Ok(redirect);
        }
        let (cookie, linked) = self.admit(&mut target, &parts, &access, visit.peer.tls)?;
        // Who came by a link stays no longer than links are good.
        let mut end = linked.then(|| {
            let (sandboxes, id) = (self.sandboxes.clone(), target.id.clone());
            Box::pin(async move { sandboxes.links_closed(&id).await })
        });
        let permit = self
            .sandboxes
            .begin(&access)
            .map_err(Failure::ExchangeLimit)?;
        let most = self.config.limits.exchanges;
        let underway = Underway::begin(&self.counters, most, permit).ok_or(Failure::Overloaded)?;
        let host = host_written(&parts);
        let passage = Passage {
            peer: visit.peer,
            request_id: &visit.request_id,
            target: &target,
            host: &host,
            access: &access,
            config: &self.config,
        };
        passage.to_guest(&mut parts);
        let key = (target.id.clone(), target.port);
        let sending = exchange::send(self, &key, parts, body, protocol.is_some());
        let (mut answer, lease) = match &mut end {
            None => sending.await?,
            Some(end) => tokio::select! {
                sent = sending => sent?,
                () = end => return Err(Failure::Link),
            },
        };
        add(&self.counters.answered, 1);
        let switched = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
        let upgraded = match (&protocol, answer.headers().get(hyper::header::UPGRADE)) {
            (Some(_), Some(agreed)) if switched => Some(agreed.clone()),
            _ if switched => {
                return Err(Failure::Unavailable(
                    "it switched to a protocol nobody asked for".to_owned(),
                ));
            }
            _ => None,
        };
        let guest = upgraded.is_some().then(|| hyper::upgrade::on(&mut answer));
        let (mut head, incoming) = answer.into_parts();
        head.version = Version::HTTP_11;
        passage.to_client(&mut head.headers, upgraded);
        if let Some(cookie) = cookie {
            head.headers.append(SET_COOKIE, cookie);
        }
        let Some(guest) = guest else {
            let body = ToClient::new(
                incoming,
                Arc::clone(&self.counters),
                Arc::clone(&self.pool),
                lease,
                underway,
            );
            let body = body.boxed_unsync();
            let body = match end {
                None => body,
                Some(end) => Until::new(body, end).boxed_unsync(),
            };
            return Ok(Response::from_parts(head, body));
        };
        let (counters, half_closed) = (Arc::clone(&self.counters), self.config.limits.half_closed);
        let stream = async move {
            if let (Ok(client), Ok(guest)) = tokio::join!(visit.upgrade, guest) {
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
            drop((lease, underway));
        };
        visit.tasks.spawn(stream.in_current_span());
        Ok(Response::from_parts(head, full("")))
    }

    /// Checks that the client may pass; takes a signed link out of the query. Gives the cookie that stands for the link, and whether
    /// the client came by one.
    fn admit(
        &self,
        target: &mut Target,
        parts: &Parts,
        access: &Access,
        tls: bool,
    ) -> Result<(Cookie, bool), Failure> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(u64::MAX, |since| since.as_secs());
        let (id, port) = (&target.id, target.port);
        let by_path = |expires: &str, signature: &str| {
            let signer = self.signer.as_ref().filter(|_| !access.links_closed)?;
            signer.opens_path(id, port, expires, signature, now)
        };
        let mut cookie = None;
        let linked = match &target.how {
            How::Headers | How::Host(None) => false,
            How::Host(Some((expires, signature))) => {
                let signer = self.signer.as_ref().ok_or(Failure::Link)?;
                let opens = signer.opens_label(id, port, expires, signature, now);
                if !opens || access.links_closed {
                    return Err(Failure::Link);
                }
                true
            }
            How::Path(prefix) => match take_link(&target.path) {
                Some((path, expires, signature)) => {
                    let until = by_path(&expires, &signature).ok_or(Failure::Link)?;
                    let secure = if tls { "; Secure" } else { "" };
                    let text = format!(
                        "{}link_{port}={until}.{signature}; Path={prefix}; Max-Age={}; HttpOnly; SameSite=Lax{secure}",
                        set_cookie::OWN,
                        until.saturating_sub(now),
                    );
                    cookie = HeaderValue::from_str(&text).ok();
                    target.path = path;
                    true
                }
                None => {
                    let name = format!("{}link_{port}", set_cookie::OWN);
                    set_cookie::named(parts.headers.get_all(COOKIE).iter(), &name)
                        .filter_map(|value| value.split_once('.'))
                        .any(|(expires, signature)| by_path(expires, signature).is_some())
                }
            },
        };
        // The agent checks a token of its own.
        let public = u32::from(port) == ENVD_PORT || linked;
        match &access.traffic_token {
            Some(token) if !public => {
                let given = only(&parts.headers, TRAFFIC_TOKEN);
                let given = given.map_err(|()| Failure::Token)?.ok_or(Failure::Token)?;
                if bool::from(given.as_bytes().ct_eq(token.as_bytes())) {
                    Ok((cookie, linked))
                } else {
                    Err(Failure::Token)
                }
            }
            _ => Ok((cookie, linked)),
        }
    }
}

/// `/sandboxes/{id}/proxy/{port}` leads to the same with a slash, from where relative addresses lead to the guest.
fn with_slash(target: &Target, parts: &Parts) -> Option<Response<Body>> {
    let How::Path(prefix) = &target.how else {
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
