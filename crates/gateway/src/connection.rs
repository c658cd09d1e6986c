//! One client's connection: HTTP/1.1 or HTTP/2, watched so that it is not held open by saying nothing.

use crate::admission::Permit;
use crate::body::{Body, FromClient, Holding, Unread};
use crate::config::Limits;
use crate::counters::add;
use crate::first::First;
use crate::gateway::{ControlPlane, Gateway, Peer};
use crate::listener::Tasks;
use crate::sandboxes::Sandboxes;
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper::header::{CONNECTION, EXPECT, HeaderValue};
use hyper::service::Service;
use hyper::{Method, Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};

/// Bytes a client may send ahead on one HTTP/2 stream, and on a connection.
const WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;
/// Bytes held for one HTTP/2 stream whose client reads slowly.
const SEND_BUFFER: usize = 128 * 1024;
/// How often an HTTP/2 client is asked whether it is there, and how long it has for the answer.
const PING: Duration = Duration::from_secs(30);

/// How long and for how many bytes a client is heard out that is still sending when it has its answer.
const HEAR_OUT: Duration = Duration::from_secs(5);
const HEAR_OUT_BYTES: usize = 64 << 20;

/// What happens on a connection.
#[derive(Debug)]
struct Activity {
    state: Mutex<State>,
    permit: Permit,
}

#[derive(Debug)]
struct State {
    /// Requests whose answers are not complete.
    underway: usize,
    /// HTTP/2 has frames that belong to no request: there, bytes do not mean that a head has begun.
    http2: bool,
    /// The last request came with a body, whose rest may still be coming when we close.
    body: bool,
    /// The gateway ends, and hears nobody out.
    leaving: bool,
    /// A client that sends nothing any more still gets the answer that is under way. Otherwise it is taken for one that has gone.
    patient: bool,
    /// Who is to hear then that it sends nothing any more.
    ended: Option<Waker>,
    /// Since when nothing is under way.
    quiet: Instant,
    /// Since when the head of a request is arriving.
    head: Option<Instant>,
}

impl State {
    fn no_patience(&mut self) {
        self.patient = false;
        if let Some(waker) = self.ended.take() {
            waker.wake();
        }
    }
}

impl Activity {
    /// A connection begins as if a head had begun: whoever connects is to say what for.
    fn new(began: Instant, permit: Permit) -> Self {
        let state = Mutex::new(State {
            underway: 0,
            http2: false,
            body: false,
            leaving: false,
            patient: false,
            ended: None,
            quiet: began,
            head: Some(began),
        });
        Self { state, permit }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heard(&self) {
        let mut state = self.state();
        if state.underway == 0 && !state.http2 && state.head.is_none() {
            state.head = Some(Instant::now());
        }
    }

    /// Whether the client may still be sending what belongs to a request that was answered already.
    fn may_have_more(&self) -> bool {
        let state = self.state();
        !state.leaving && (state.body || state.head.is_some())
    }

    /// When it is closed if nothing else happens.
    fn deadline(&self, limits: &Limits) -> Option<Instant> {
        let state = self.state();
        match state.head {
            _ if state.underway > 0 => None,
            Some(since) => since.checked_add(limits.head),
            None if self.permit.known() => state.quiet.checked_add(limits.idle),
            None => state.quiet.checked_add(limits.idle_unknown),
        }
    }
}

/// A request that is under way until this is dropped.
pub(crate) struct Turn(Arc<Activity>);

impl Turn {
    fn begin(activity: &Arc<Activity>, request: &Request<Incoming>) -> Self {
        let mut state = activity.state();
        state.underway += 1;
        state.head = None;
        state.http2 = request.version() == Version::HTTP_2;
        state.body = !state.http2 && !request.body().is_end_stream();
        // What is only asked for is soon told, unless a guest is asked.
        let asks = matches!(*request.method(), Method::GET | Method::HEAD);
        state.patient = !state.http2 && !state.body && asks;
        drop(state);
        Self(Arc::clone(activity))
    }

    /// The answer may take any time: nobody waits for it who sends nothing any more.
    pub(crate) fn takes_long(&self) {
        self.0.state().no_patience();
    }

    /// The client showed a key, or reached a sandbox.
    pub(crate) fn is_known(&self) {
        self.0.permit.is_known();
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.underway -= 1;
        state.quiet = Instant::now();
        state.no_patience();
    }
}

/// The stream below, telling when bytes arrive. It stays with the connection through an upgrade, and so does the permit.
struct Watched<T> {
    inner: T,
    /// Read before anything was made for the connection.
    first: First,
    activity: Arc<Activity>,
    hearing_out: Option<HearingOut>,
}

/// Reading what nobody wants: a close with bytes unread would reset the connection and take the answer with it.
struct HearingOut {
    limit: Pin<Box<Sleep>>,
    left: usize,
}

impl HearingOut {
    fn new() -> Self {
        Self {
            limit: Box::pin(sleep(HEAR_OUT)),
            left: HEAR_OUT_BYTES,
        }
    }

    /// Ready when the client has said all, or enough.
    fn poll<T: AsyncRead + Unpin>(&mut self, cx: &mut Context<'_>, stream: &mut T) -> Poll<()> {
        let mut space = [MaybeUninit::uninit(); 16 * 1024];
        while self.left > 0 && self.limit.as_mut().poll(cx).is_pending() {
            let mut buffer = ReadBuf::uninit(&mut space);
            match ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {
                    self.left = self.left.saturating_sub(buffer.filled().len());
                }
                _ => break,
            }
        }
        Poll::Ready(())
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Watched<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.first.give(buf) {
            self.activity.heard();
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        let result = Pin::new(&mut self.inner).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.activity.heard();
        } else if matches!(result, Poll::Ready(Ok(()))) && buf.remaining() > 0 {
            let mut state = self.activity.state();
            if state.patient {
                state.ended = Some(cx.waker().clone());
                return Poll::Pending;
            }
        }
        result
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Watched<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.hearing_out.is_none() {
            ready!(Pin::new(&mut this.inner).poll_shutdown(cx))?;
            if !this.activity.may_have_more() {
                return Poll::Ready(Ok(()));
            }
        }
        let hearing_out = this.hearing_out.get_or_insert_with(HearingOut::new);
        hearing_out.poll(cx, &mut this.inner).map(Ok)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

struct Requests<S, C> {
    gateway: Gateway<S, C>,
    peer: Peer,
    activity: Arc<Activity>,
    tasks: Tasks,
}

impl<S: Sandboxes, C: ControlPlane> Service<Request<Incoming>> for Requests<S, C> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let turn = Turn::begin(&self.activity, &request);
        let (gateway, peer, tasks) = (self.gateway.clone(), self.peer, self.tasks.clone());
        let unread = Unread::default();
        let http2 = request.version() == Version::HTTP_2;
        // Reading would invite the client to send.
        let invited = !request.headers().contains_key(EXPECT);
        let request = request.map(|body| FromClient::new(body, unread.clone()));
        Box::pin(async move {
            let mut answer = gateway.handle(request, peer, tasks, &turn).await;
            if !http2 && unread.is_some() && !(invited && unread.read().await) {
                // The connection is closed then, and whoever takes it for the next request should know.
                let close = HeaderValue::from_static("close");
                answer.headers_mut().insert(CONNECTION, close);
            }
            if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
                // What comes from now on is the stream's.
                turn.0.state().body = false;
            }
            Ok(answer.map(|body| Holding::new(body, turn).boxed_unsync()))
        })
    }
}

/// Serves a connection to its end. Until its client has sent something it costs little more than
/// the stream: buffers come with the first byte, and so does most of the future.
pub(crate) async fn serve<S, C, T>(
    gateway: Gateway<S, C>,
    mut stream: T,
    peer: Peer,
    permit: Permit,
    tasks: Tasks,
) where
    S: Sandboxes,
    C: ControlPlane,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let began = Instant::now();
    let first = tokio::select! {
        first = timeout(gateway.shared.config.limits.head, First::read(&mut stream)) => first,
        () = tasks.stopping() => return,
    };
    let first = match first {
        Ok(Ok(first)) if !first.is_empty() => first,
        Ok(_) => return,
        Err(_) => {
            add(&gateway.shared.counters.connections_timed_out, 1);
            return;
        }
    };
    let activity = Arc::new(Activity::new(began, permit));
    let stream = Watched {
        inner: stream,
        first,
        activity: Arc::clone(&activity),
        hearing_out: None,
    };
    Box::pin(exchange(gateway, stream, peer, activity, tasks)).await;
}

/// Serves a connection on which something was said.
async fn exchange<S, C, T>(
    gateway: Gateway<S, C>,
    stream: Watched<T>,
    peer: Peer,
    activity: Arc<Activity>,
    tasks: Tasks,
) where
    S: Sandboxes,
    C: ControlPlane,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let shared = Arc::clone(&gateway.shared);
    let limits = &shared.config.limits;
    let requests = Requests {
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
        // Errors are the client's, and end only its connection.
        if connection.as_mut().poll(cx).is_ready() {
            return Poll::Ready(false);
        }
        loop {
            let now = Instant::now();
            let deadline = activity.deadline(limits);
            if deadline.is_some_and(|deadline| deadline <= now) {
                return Poll::Ready(true);
            }
            // With something under way nobody tells when it ends: look again later.
            let wake = deadline.or(armed.filter(|armed| *armed > now));
            let wake = wake.or(now.checked_add(limits.idle)).unwrap_or(now);
            if armed != Some(wake) {
                armed = Some(wake);
                timer.as_mut().reset(wake);
            }
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
        () = tasks.cut() => return,
        () = tasks.stopping() => activity.state().leaving = true,
    }
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        _ = connection => {}
        () = tasks.cut() => {}
    }
}

fn builder(limits: &Limits) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // A second wall behind `Activity`, which tells apart waiting for a request and waiting for its rest.
        .header_read_timeout(limits.idle)
        // Servers in guests that are older than their standards look for names as clients write them.
        .preserve_header_case(true)
        .max_headers(limits.headers)
        .max_buf_size(limits.head_bytes.max(8 * 1024));
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .max_concurrent_streams(limits.streams)
        .max_header_list_size(u32::try_from(limits.head_bytes).unwrap_or(u32::MAX))
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER);
    builder
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::sandboxes::{Access, OpenError};
    use std::net::Ipv4Addr;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::net::UnixStream;

    /// One sandbox, whose guest never answers.
    #[derive(Debug, Clone)]
    struct Silent;

    impl Sandboxes for Silent {
        fn find(&self, _: &str) -> Option<Access> {
            Some(Access::default())
        }

        async fn open(&self, _: &str, _: u16) -> Result<UnixStream, OpenError> {
            std::future::pending().await
        }
    }

    /// What a client hears whose request and end are there before anybody looks.
    async fn heard(request: &str) -> String {
        let control = axum::Router::new().fallback(async || {
            tokio::task::yield_now().await;
            "control plane"
        });
        let gateway = Gateway::new(Config::default(), Silent, control, None);
        let peer = Peer {
            ip: Ipv4Addr::LOCALHOST.into(),
            tls: false,
            local: false,
        };
        let permit = gateway.shared.admission.enter(peer.ip).unwrap();
        let (mut client, server) = duplex(64 * 1024);
        client.write_all(request.as_bytes()).await.unwrap();
        client.shutdown().await.unwrap();
        serve(gateway, server, peer, permit, Tasks::default()).await;
        let mut heard = String::new();
        client.read_to_string(&mut heard).await.unwrap();
        heard
    }

    #[tokio::test]
    async fn whoever_asked_and_sends_no_more_is_answered_unless_a_guest_was_asked() {
        let of = |method: &str, more: &str| {
            format!("{method} /x HTTP/1.1\r\nHost: localhost\r\n{more}\r\n")
        };
        let answer = heard(&of("GET", "")).await;
        assert!(answer.ends_with("control plane"), "{answer}");
        assert_eq!(heard(&of("POST", "")).await, "");
        let guest = "E2b-Sandbox-Id: i0123456789abcdefghi\r\nE2b-Sandbox-Port: 80\r\n";
        let began = Instant::now();
        assert_eq!(heard(&of("GET", guest)).await, "");
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "it is let go at once"
        );
    }
}
