//! [`Server`]: the listener of a member. It accepts connections from members, from fronts, and from
//! hosts that join.
//!
//! A front is a process without sandboxes that passes connections of clients to the hosts, like a
//! load balancer. It has a member id and a certificate, but takes no part in decisions of the
//! fleet, so it may use only a few routes.

use super::body::{Body, BodyError, body, read_body};
use super::identity::Identity;
use super::limits::{Admitted, Connections, Limits};
use super::{
    CONNECTION_WINDOW, JOIN_PATH, MAX_HEADER_BYTES, MAX_JOIN_BYTES, MAX_MESSAGE_BYTES, MAX_STREAMS,
    PING_INTERVAL, PING_TIMEOUT, STREAM_WINDOW,
};
use crate::certificates::MemberCertificate;
use async_trait::async_trait;
use bytes::Bytes;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use jiffy_fleet_core::MemberId;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

/// Pause after a failed accept, for example because the process has no free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Interval of the listener's pings. The interval of clients is shorter: usually the client detects
/// the loss of a connection.
const SERVER_PING_INTERVAL: Duration = PING_INTERVAL.saturating_mul(3);

/// Interval at which the permission of a connected member is checked, also between requests.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Serves requests of members with bodies of any length.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Answers a request of `peer`. Its path includes the prefix of the route.
    async fn handle(&self, peer: MemberId, request: Request<Incoming>) -> Response<Body>;
}

/// Serves messages of members.
#[async_trait]
pub trait MessageHandler: Send + Sync + 'static {
    /// Answers a message of `peer` of at most [`MAX_MESSAGE_BYTES`].
    async fn message(&self, peer: MemberId, message: Bytes) -> Result<Bytes, Rejected>;
}

/// Serves hosts that join.
#[async_trait]
pub trait JoinHandler: Send + Sync + 'static {
    /// Answers a join request from the address `from`. The request has at most [`MAX_JOIN_BYTES`].
    async fn join(&self, from: SocketAddr, request: Bytes) -> Result<Bytes, Rejected>;
}

/// Decides whether a member with a valid certificate is served: an error is the reason of a
/// rejection, for example that the member was removed.
pub type PeerCheck = Arc<dyn Fn(MemberId) -> Result<(), String> + Send + Sync>;

/// Rejection of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// HTTP status, at least 400.
    pub status: u16,
    /// Reason.
    pub reason: String,
}

impl Rejected {
    /// Returns a rejection.
    pub fn new(status: u16, reason: impl Into<String>) -> Self {
        Self {
            status,
            reason: reason.into(),
        }
    }

    /// Returns the response to a request.
    pub fn response(self) -> Response<Body> {
        let mut response = Response::new(body(self.reason));
        *response.status_mut() =
            StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        response
    }
}

impl From<BodyError> for Rejected {
    fn from(error: BodyError) -> Self {
        let status = match error {
            BodyError::TooLarge(_) => 413,
            BodyError::Timeout(_) => 408,
            BodyError::Interrupted(_) => 400,
        };
        Self::new(status, error.to_string())
    }
}

/// Route below a prefix of paths.
enum Route {
    Message(Arc<dyn MessageHandler>),
    Requests(Arc<dyn Handler>),
}

/// Listener of a member, before it is started.
pub struct Server {
    identity: Identity,
    limits: Limits,
    check: PeerCheck,
    /// Handlers by path, or by the prefix of their paths.
    routes: BTreeMap<String, Route>,
    /// Complete paths that fronts may request.
    for_fronts: BTreeSet<String>,
    /// Handler of join requests. `None` if this listener accepts none.
    join: Option<Arc<dyn JoinHandler>>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("identity", &self.identity)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// Running listener. It stops, and all connections end, when the handle is dropped.
#[derive(Debug)]
pub struct ServerHandle {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl ServerHandle {
    /// Returns the local address.
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    /// Returns a listener without routes. `check` is called for each request of a member.
    pub fn new(identity: Identity, check: PeerCheck) -> Self {
        Self {
            identity,
            limits: Limits::default(),
            check,
            routes: BTreeMap::new(),
            for_fronts: BTreeSet::new(),
            join: None,
        }
    }

    /// Sets the limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Serves messages at the path `path`.
    #[must_use]
    pub fn messages(mut self, path: &str, handler: Arc<dyn MessageHandler>) -> Self {
        self.routes.insert(path.to_owned(), Route::Message(handler));
        self
    }

    /// Serves requests at the path `prefix` and below it.
    #[must_use]
    pub fn requests(mut self, prefix: &str, handler: Arc<dyn Handler>) -> Self {
        self.routes
            .insert(prefix.to_owned(), Route::Requests(handler));
        self
    }

    /// Permits fronts to send requests to exactly `path`, but not to paths below it. All paths
    /// without this permission are denied to fronts.
    #[must_use]
    pub fn for_fronts(mut self, path: &str) -> Self {
        self.for_fronts.insert(path.to_owned());
        self
    }

    /// Serves hosts that join.
    #[must_use]
    pub fn join(mut self, handler: Arc<dyn JoinHandler>) -> Self {
        self.join = Some(handler);
        self
    }

    /// Starts the listener. The caller runs in a runtime of tokio.
    ///
    /// # Errors
    /// If the local address of `listener` is unknown.
    pub fn start(self, listener: TcpListener) -> io::Result<ServerHandle> {
        let address = listener.local_addr()?;
        let task = tokio::spawn(Arc::new(self).accept(listener));
        Ok(ServerHandle { address, task })
    }

    /// Accepts connections until the task is aborted.
    async fn accept(self: Arc<Self>, listener: TcpListener) {
        let connections = Arc::new(Connections::default());
        // Dropping the set ends all connections.
        let mut tasks = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                Some(_) = tasks.join_next() => continue,
            };
            let (stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection of a member");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            if let Some(admitted) = connections.admit(from.ip(), &self.limits) {
                // Ignore the error: small messages are then sent later, but nothing fails.
                let _ = stream.set_nodelay(true);
                tasks.spawn(self.clone().connection(stream, from, admitted));
            }
        }
    }

    /// Serves a connection until it ends.
    async fn connection(
        self: Arc<Self>,
        stream: TcpStream,
        from: SocketAddr,
        mut admitted: Admitted,
    ) {
        let acceptor = TlsAcceptor::from(self.identity.server());
        let handshake = acceptor.accept(stream);
        let stream = match tokio::time::timeout(self.limits.handshake, handshake).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                tracing::debug!(%from, %error, "TLS handshake of a member failed");
                return;
            }
            Err(_) => return,
        };
        let certificate = stream.get_ref().1.peer_certificates().map(<[_]>::first);
        match certificate.flatten() {
            Some(der) => match MemberCertificate::read(der, self.identity.fleet()) {
                Ok(peer) if admitted.authenticated(&self.limits) => {
                    let (check, member) = (self.check.clone(), peer.member);
                    let service = service_fn(move |request| {
                        let server = self.clone();
                        async move { Ok(server.member_request(peer, request).await) }
                    });
                    tokio::select! {
                        () = serve(stream, MAX_STREAMS, service) => {}
                        () = until_rejected(check, member) => {
                            tracing::warn!(%member, "closing the connection of a removed member");
                        }
                    }
                }
                Ok(peer) => {
                    let member = peer.member;
                    tracing::warn!(%member, "rejected a connection of a member: too many are open");
                }
                Err(error) => tracing::warn!(%from, %error, "rejected the certificate of a peer"),
            },
            None => {
                let limit = self.limits.join;
                let service = service_fn(move |request| {
                    let server = self.clone();
                    async move { Ok(server.join_request(from, request).await) }
                });
                // Ignore errors and timeouts: they concern only the host that joins, and its
                // command reports them.
                let _ = tokio::time::timeout(limit, serve(stream, 1, service)).await;
            }
        }
    }

    /// Answers a request of a member or a front, after checking its certificate and its permission.
    async fn member_request(
        &self,
        peer: MemberCertificate,
        request: Request<Incoming>,
    ) -> Response<Body> {
        let checked = if peer.expires <= SystemTime::now() {
            Err("the certificate of this member is expired".to_owned())
        } else {
            (self.check)(peer.member)
        };
        if let Err(reason) = checked {
            return Rejected::new(403, reason).response();
        }
        let is_permitted =
            !peer.member.is_front() || self.for_fronts.contains(request.uri().path());
        if !is_permitted {
            return Rejected::new(403, "fronts may not call this").response();
        }
        match self.route(request.uri().path()) {
            None => Rejected::new(404, "this member does not know the path").response(),
            Some(Route::Requests(handler)) => handler.handle(peer.member, request).await,
            Some(Route::Message(handler)) => {
                let limit = self.limits.message;
                match read_body(request.into_body(), MAX_MESSAGE_BYTES, limit).await {
                    Ok(message) => answer(handler.message(peer.member, message).await),
                    Err(error) => Rejected::from(error).response(),
                }
            }
        }
    }

    /// Answers a peer without a certificate, which may only send join requests.
    async fn join_request(&self, from: SocketAddr, request: Request<Incoming>) -> Response<Body> {
        let is_join = request.uri().path() == JOIN_PATH && request.method() == Method::POST;
        let handler = match &self.join {
            Some(handler) if is_join => handler,
            _ => {
                let reason = "only a member of the fleet can call this: no certificate was sent";
                return Rejected::new(403, reason).response();
            }
        };
        match read_body(request.into_body(), MAX_JOIN_BYTES, self.limits.message).await {
            Ok(request) => answer(handler.join(from, request).await),
            Err(error) => Rejected::from(error).response(),
        }
    }

    /// Returns the route of a path: of messages with this path, or of requests with the longest
    /// prefix.
    fn route(&self, path: &str) -> Option<&Route> {
        let below = |prefix: &str, path: &str| {
            path.strip_prefix(prefix)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.routes
            .iter()
            .filter(|(prefix, route)| match route {
                Route::Message(_) => prefix.as_str() == path,
                Route::Requests(_) => below(prefix.trim_end_matches('/'), path),
            })
            .max_by_key(|(prefix, _)| prefix.len())
            .map(|(_, route)| route)
    }
}

fn answer(result: Result<Bytes, Rejected>) -> Response<Body> {
    match result {
        Ok(content) => Response::new(body(content)),
        Err(rejected) => rejected.response(),
    }
}

/// Returns when `check` no longer permits a member, at most [`CHECK_INTERVAL`] later. New requests
/// of the member are rejected at once in any case. The caller then closes the connection, which
/// also ends streams that could last for days.
async fn until_rejected(check: PeerCheck, member: MemberId) {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        if check(member).is_err() {
            return;
        }
    }
}

/// Serves HTTP/2 on a connection.
async fn serve<S, F>(
    stream: tokio_rustls::server::TlsStream<TcpStream>,
    max_streams: u32,
    service: S,
) where
    S: hyper::service::Service<
            Request<Incoming>,
            Response = Response<Body>,
            Error = Infallible,
            Future = F,
        >,
    F: Future<Output = Result<Response<Body>, Infallible>> + Send + 'static,
{
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(max_streams)
        .max_header_list_size(MAX_HEADER_BYTES)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .keep_alive_interval(SERVER_PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "connection of a member ended");
    }
}
