//! Serves one client connection over HTTP/1.1 or HTTP/2, and closes it when it is idle for too
//! long. The listener starts a task with it for each connection.

use crate::activity::{ConnectionActivity, InFlightRequest};
use crate::admission::ConnectionPermit;
use crate::body::Body;
use crate::config::GatewayLimits;
use crate::control_plane::ControlPlane;
use crate::counters::add;
use crate::first_bytes::FirstBytes;
use crate::gateway::Gateway;
use crate::peer::Peer;
use crate::request_body::{ClientRequestBody, UnreadBody};
use crate::sandboxes::Sandboxes;
use crate::tasks::ConnectionTasks;
use crate::watched_stream::WatchedStream;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, EXPECT, HeaderValue};
use hyper::service::Service;
use hyper::{Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use jiffy_http::GuardedBody;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep_until, timeout};

/// Flow control window of an HTTP/2 stream, in bytes.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
/// Flow control window of an HTTP/2 connection, in bytes.
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;
/// Size of the send buffer of an HTTP/2 stream whose client reads slowly, in bytes.
const SEND_BUFFER_BYTES: usize = 128 * 1024;
/// Interval of HTTP/2 pings, and timeout of a ping.
const PING_INTERVAL: Duration = Duration::from_secs(30);

/// Service that hyper calls for each request of one connection.
struct RequestService<S, C> {
    gateway: Gateway<S, C>,
    peer: Peer,
    activity: Arc<ConnectionActivity>,
    tasks: ConnectionTasks,
}

impl<S: Sandboxes, C: ControlPlane> Service<Request<Incoming>> for RequestService<S, C> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let in_flight = InFlightRequest::begin(&self.activity, &request);
        let (gateway, peer, tasks) = (self.gateway.clone(), self.peer, self.tasks.clone());
        let unread = UnreadBody::default();
        let http2 = request.version() == Version::HTTP_2;
        // Reading the body of a client that waits for `100 Continue` would make the client send it.
        let is_sending = !request.headers().contains_key(EXPECT);
        let request = request.map(|body| ClientRequestBody::new(body, unread.clone()));
        Box::pin(async move {
            let mut answer = gateway.handle(request, peer, tasks, &in_flight).await;
            // Read the rest of a body that the handler did not read. An unread rest would precede
            // the next request on this connection.
            if !http2 && unread.is_some() && !(is_sending && unread.read().await) {
                // The connection is closed after this answer, so the client must not send its next
                // request on it.
                let close = HeaderValue::from_static("close");
                answer.headers_mut().insert(CONNECTION, close);
            }
            if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
                // Later bytes belong to the upgraded stream.
                in_flight.body_ended();
            }
            Ok(answer.map(|body| GuardedBody::new(body, in_flight).boxed_unsync()))
        })
    }
}

/// Serves a connection to its end. Until the client has sent its first byte, the connection uses
/// little more memory than its stream: buffers and most of the future are allocated afterwards.
pub(crate) async fn serve<S, C, T>(
    gateway: Gateway<S, C>,
    mut stream: T,
    peer: Peer,
    permit: ConnectionPermit,
    tasks: ConnectionTasks,
) where
    S: Sandboxes,
    C: ControlPlane,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let started = Instant::now();
    let first = tokio::select! {
        first = timeout(gateway.shared.config.limits.head, FirstBytes::read(&mut stream)) => first,
        // No request was received yet, so nothing is lost.
        () = tasks.stopping() => return,
    };
    let first = match first {
        Ok(Ok(first)) if !first.is_empty() => first,
        // The client closed the connection or failed before its first byte.
        Ok(_) => return,
        Err(_) => {
            add(&gateway.shared.counters.connections_timed_out, 1);
            return;
        }
    };
    let activity = Arc::new(ConnectionActivity::new(started, permit));
    let stream = WatchedStream::new(stream, first, Arc::clone(&activity));
    Box::pin(exchange(gateway, stream, peer, activity, tasks)).await;
}

/// Serves a connection after its first bytes.
async fn exchange<S, C, T>(
    gateway: Gateway<S, C>,
    stream: WatchedStream<T>,
    peer: Peer,
    activity: Arc<ConnectionActivity>,
    tasks: ConnectionTasks,
) where
    S: Sandboxes,
    C: ControlPlane,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let shared = Arc::clone(&gateway.shared);
    let limits = &shared.config.limits;
    let requests = RequestService {
        gateway,
        peer,
        activity: Arc::clone(&activity),
        tasks: tasks.clone(),
    };
    let builder = builder(limits);
    let mut connection =
        pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), requests));
    let mut timer = pin!(sleep_until(Instant::now()));
    let mut armed: Option<Instant> = None;
    let watched = poll_fn(|cx| {
        // An error concerns only this client, whose connection then ends.
        if connection.as_mut().poll(cx).is_ready() {
            return Poll::Ready(false);
        }
        loop {
            let now = Instant::now();
            // The deadline changes with every byte and request, so it is read after each poll.
            let deadline = activity.deadline(limits);
            if deadline.is_some_and(|deadline| deadline <= now) {
                return Poll::Ready(true);
            }
            // A connection with a request in flight has no deadline. The completion of the request
            // sets one but does not wake this task, so the timer must wake it. The timer retains
            // its time; if that time has passed, it is set to the end of the idle timeout.
            let wake = deadline.or(armed.filter(|armed| *armed > now));
            let wake = wake.or(now.checked_add(limits.idle)).unwrap_or(now);
            if armed != Some(wake) {
                armed = Some(wake);
                timer.as_mut().reset(wake);
            }
            // If the timer has already expired, check the deadline again.
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    });
    let mut watched = pin!(watched);
    tokio::select! {
        late = &mut watched => {
            if late {
                add(&shared.counters.connections_timed_out, 1);
            }
            return;
        }
        () = tasks.aborted() => return,
        () = tasks.stopping() => activity.shut_down(),
    }
    // Complete the requests in flight, but accept no further ones.
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        _ = connection => {}
        () = tasks.aborted() => {}
    }
}

/// Returns the settings of HTTP/1.1 and HTTP/2 on connections of clients.
fn builder(limits: &GatewayLimits) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // Additional limit after `ConnectionActivity`, which distinguishes waiting for a request
        // from waiting for the remainder of its head.
        .header_read_timeout(limits.idle)
        // Old servers in guests expect header names in the usual case.
        .preserve_header_case(true)
        .max_headers(limits.headers)
        // hyper panics on a smaller buffer.
        .max_buf_size(limits.head_bytes.max(8 * 1024));
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_INTERVAL)
        .max_concurrent_streams(limits.streams)
        .max_header_list_size(u32::try_from(limits.head_bytes).unwrap_or(u32::MAX))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES);
    builder
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::GatewayConfig;
    use crate::sandboxes::{OpenError, SandboxAccess};
    use std::net::Ipv4Addr;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::net::UnixStream;

    /// Sandbox whose guest never answers.
    #[derive(Debug, Clone)]
    struct Silent;

    impl Sandboxes for Silent {
        type Stream = UnixStream;

        fn find(&self, _: &str) -> Option<SandboxAccess> {
            Some(SandboxAccess::default())
        }

        async fn open(&self, _: &str, _: u16) -> Result<UnixStream, OpenError> {
            std::future::pending().await
        }
    }

    /// Returns the answer to a client that sends its request and closes its side before being
    /// served.
    async fn answer_after_half_close(request: &str) -> String {
        let control = axum::Router::new().fallback(async || {
            tokio::task::yield_now().await;
            "control plane"
        });
        let gateway = Gateway::new(GatewayConfig::default(), Silent, control, None);
        let peer = Peer {
            ip: Ipv4Addr::LOCALHOST.into(),
            tls: false,
            local: false,
        };
        let permit = gateway.shared.admission.enter(peer.ip).unwrap();
        let (mut client, server) = duplex(64 * 1024);
        client.write_all(request.as_bytes()).await.unwrap();
        client.shutdown().await.unwrap();
        serve(gateway, server, peer, permit, ConnectionTasks::default()).await;
        let mut received = String::new();
        client.read_to_string(&mut received).await.unwrap();
        received
    }

    #[tokio::test]
    async fn a_client_that_half_closes_is_answered_by_the_control_plane_only() {
        let of = |method: &str, more: &str| {
            format!("{method} /x HTTP/1.1\r\nHost: localhost\r\n{more}\r\n")
        };
        let answer = answer_after_half_close(&of("GET", "")).await;
        assert!(answer.ends_with("control plane"), "{answer}");
        // The control plane completes only requests that change nothing (GET and HEAD).
        assert_eq!(answer_after_half_close(&of("POST", "")).await, "");
        let guest = "E2b-Sandbox-Id: i0123456789abcdefghi\r\nE2b-Sandbox-Port: 80\r\n";
        let started = Instant::now();
        assert_eq!(answer_after_half_close(&of("GET", guest)).await, "");
        assert!(
            started.elapsed() < Duration::from_secs(10),
            "the connection is closed immediately"
        );
    }
}
