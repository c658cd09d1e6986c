//! Sends one request to a guest, or to the gateway of another host, and receives the head of the
//! response. Uses an idle connection of the pool, or opens a new one.
//!
//! The *head* of a request or response is its first line and its headers, without the body. A
//! *permit* counts towards a limit until it is dropped. The *epoch* of a pool counts the calls of
//! `invalidate`. A connection that was opened in an earlier epoch is closed after use.

use crate::config::GatewayLimits;
use crate::counters::add;
use crate::other_hosts::OtherHosts;
use crate::peer::Peer;
use crate::pool::{GuestConnection, GuestConnectionPool, PoolKey};
use crate::request_body::{ClientRequestBody, GuestRequestBody};
use crate::request_error::RequestError;
use crate::sandboxes::{OpenError, Sandboxes};
use crate::state::GatewayState;
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper::http::request::Parts;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use jiffy_http::{PooledConnection, UpstreamConnection};
use jiffy_proto::agent::ENVD_PORT;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

/// Maximum idle time of a connection that is reused for a request that must not be repeated. A
/// server in a guest may be about to close a connection that has been idle for longer. Connections
/// to the agent are exempt, because the agent keeps them open far longer than the pool.
const MAX_UNREPEATABLE_IDLE: Duration = Duration::from_secs(1);

/// Receiver of a request.
pub(crate) enum Upstream {
    /// Port of a sandbox on this host.
    Guest {
        key: PoolKey,
        /// Host name of a server that uses TLS. `None` if the server uses plain HTTP.
        tls: Option<String>,
    },
    /// Gateway of another host, which serves one client per connection.
    Host {
        key: PoolKey,
        hosts: Arc<dyn OtherHosts>,
        host: Arc<str>,
        peer: Peer,
    },
}

impl Upstream {
    /// Returns a port of a sandbox on this host. `tls` is the host name of a server that uses TLS.
    pub fn guest(id: String, port: u16, tls: Option<String>) -> Self {
        Self::Guest {
            key: (id, port, tls.is_some()),
            tls,
        }
    }

    /// Returns the gateway of a host, for the client `peer`.
    pub fn host(hosts: &Arc<dyn OtherHosts>, host: Arc<str>, peer: Peer) -> Self {
        Self::Host {
            // For a guest, the key is the sandbox and the port. For a host, the key is the host
            // with the client's address, and the number 1 or 0 for a client with or without TLS.
            key: (format!("{host} {}", peer.ip), u16::from(peer.tls), false),
            hosts: hosts.clone(),
            host,
            peer,
        }
    }

    fn key(&self) -> &PoolKey {
        match self {
            Self::Guest { key, .. } | Self::Host { key, .. } => key,
        }
    }

    /// Returns whether the receiver keeps idle connections open for longer than the pool.
    fn keeps_idle(&self) -> bool {
        matches!(self, Self::Guest { key: (_, port, _), .. } if u32::from(*port) == ENVD_PORT)
    }

    /// Converts an error of the connection into the reason for the client.
    fn failure(&self, error: &hyper::Error) -> RequestError {
        match (self, interrupted(error)) {
            (Self::Host { host, .. }, RequestError::Unavailable(reason)) => {
                RequestError::HostUnavailable(format!("its host {host}: {reason}"))
            }
            (_, failure) => failure,
        }
    }

    fn pool<'a, S>(&self, shared: &'a GatewayState<S>) -> &'a GuestConnectionPool {
        match self {
            Self::Guest { .. } => &shared.pool,
            Self::Host { .. } => &shared.host_pool,
        }
    }
}

/// Sends a request and waits, without timeout, for the head of the response. If `fresh` is true
/// (for upgrades), uses a new connection.
pub(crate) async fn send<S: Sandboxes>(
    shared: &GatewayState<S>,
    upstream: &Upstream,
    parts: Parts,
    body: ClientRequestBody,
    fresh: bool,
) -> Result<(Response<Incoming>, GuestConnection), RequestError> {
    let counters = &shared.counters;
    // A request with a body needs a task that drives the connection. An upgrade always needs the
    // task, because awaiting the upgraded stream does not drive the connection.
    let needs_no_task = !fresh && body.is_end_stream();
    // Only an idempotent request without a body can be repeated if the reused connection fails.
    let repeatable = (body.is_end_stream() && idempotent(&parts.method)).then(|| parts.clone());
    let mut request = Request::from_parts(parts, GuestRequestBody::new(body, Arc::clone(counters)));
    let max_idle = if repeatable.is_some() || upstream.keeps_idle() {
        Duration::MAX
    } else {
        MAX_UNREPEATABLE_IDLE
    };
    let pool = upstream.pool(shared);
    if !fresh && let Some(mut guest) = pool.idle.take(upstream.key(), max_idle) {
        add(&counters.reused, 1);
        match guest.connection.send(request, needs_no_task).await {
            Ok(answer) => return Ok((answer, guest)),
            Err(mut error) => match (error.take_message(), repeatable) {
                // The connection was closed before the request was sent.
                (Some(unsent), _) => request = unsent,
                // The request was sent, but may be repeated.
                (None, Some(parts)) => {
                    request =
                        Request::from_parts(parts, GuestRequestBody::empty(Arc::clone(counters)));
                }
                // The receiver may have processed the request: do not repeat it.
                (None, None) => return Err(upstream.failure(error.error())),
            },
        }
        add(&counters.retried, 1);
    }
    let mut guest = connect(shared, upstream).await?;
    match guest.connection.send(request, needs_no_task).await {
        Ok(answer) => Ok((answer, guest)),
        Err(error) => Err(upstream.failure(error.error())),
    }
}

/// Returns true if repeating the request has the same effect as sending it once (RFC 9110, 9.2.2).
fn idempotent(method: &Method) -> bool {
    method.is_idempotent()
}

/// Converts an error of the connection into the reason for the client.
fn interrupted(error: &hyper::Error) -> RequestError {
    let reason = if error.is_parse() || error.is_parse_too_large() {
        "its answer is not HTTP, or its head is too large"
    } else if error.is_user() {
        "the client's request body is incomplete"
    } else {
        "it closed the connection before answering"
    };
    RequestError::Unavailable(reason.to_owned())
}

/// Opens a connection to `upstream`.
async fn connect<S: Sandboxes>(
    shared: &GatewayState<S>,
    upstream: &Upstream,
) -> Result<GuestConnection, RequestError> {
    let limits = &shared.config.limits;
    let (key, pool) = (upstream.key(), upstream.pool(shared));
    // Acquire the permit first: waiting clients must not pile up at a busy sandbox.
    let permit = pool
        .permit(&key.0, limits.exchanges_per_sandbox)
        .ok_or(RequestError::Busy)?;
    // Read the epoch before connecting: if the sandbox is rolled back meanwhile, the connection
    // must not return to the pool.
    let epoch = pool.idle.epoch();
    // The timeout of opening includes the time to resume the sandbox, which takes longer than
    // connecting.
    let connection = match upstream {
        Upstream::Guest {
            key: (id, port, _),
            tls,
        } => {
            let stream = opened(limits, shared.sandboxes.open(id, *port)).await?;
            add(&shared.counters.guest_connections, 1);
            match tls {
                None => handshake(limits, stream).await?,
                Some(host) => {
                    let starting = shared.guest_tls.connect(stream, host);
                    let started = timeout(limits.open, starting).await.map_err(|_| {
                        RequestError::Unavailable("the TLS handshake timed out".to_owned())
                    })?;
                    let stream = started.map_err(|e| {
                        RequestError::Unavailable(format!(
                            "TLS failed at port {port}, one of the sandbox's `httpsPorts`: {e}"
                        ))
                    })?;
                    handshake(limits, stream).await?
                }
            }
        }
        Upstream::Host {
            hosts, host, peer, ..
        } => {
            let stream = opened(limits, hosts.open(host, *peer)).await;
            let stream = stream.map_err(|e| match e {
                RequestError::Unavailable(reason) => RequestError::HostUnavailable(reason),
                e => e,
            })?;
            handshake(limits, stream).await?
        }
    };
    Ok(PooledConnection::new(
        connection,
        key.clone(),
        epoch,
        permit,
    ))
}

/// Waits for a stream, at most for the limit of opening.
async fn opened<T>(
    limits: &GatewayLimits,
    opening: impl Future<Output = Result<T, OpenError>>,
) -> Result<T, RequestError> {
    match timeout(limits.open, opening).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(OpenError::NotFound)) => Err(RequestError::NotFound),
        Ok(Err(OpenError::NotRunning)) => Err(RequestError::NotRunning),
        Ok(Err(OpenError::PortClosed)) => Err(RequestError::PortClosed),
        Ok(Err(OpenError::Limit(reason))) => Err(RequestError::Limit(reason)),
        Ok(Err(OpenError::Unavailable(reason))) => Err(RequestError::Unavailable(reason)),
        Err(_) => Err(RequestError::Unavailable(
            "timed out opening the connection".to_owned(),
        )),
    }
}

/// Starts HTTP/1.1 on a stream.
async fn handshake<T>(
    limits: &GatewayLimits,
    stream: T,
) -> Result<UpstreamConnection<GuestRequestBody>, RequestError>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let handshake = http1::Builder::new()
        // Old servers in guests compare header names in a single spelling.
        .preserve_header_case(true)
        // The setting applies to names that the gateway sets, because the client's spelling is
        // preserved.
        .title_case_headers(true)
        .max_headers(limits.headers)
        .max_header_size(limits.head_bytes)
        .max_buf_size(limits.head_bytes)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|e| interrupted(&e))?;
    Ok(UpstreamConnection::new(handshake))
}
