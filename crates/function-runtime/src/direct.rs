//! Direct connections. The daemon accepts the TCP connection of a client, determines the function
//! from the first request without consuming it, and passes the socket to this process. The process
//! then serves all requests of the connection; they bypass the gateway.
//!
//! The *head* of a request or response is its first line and its headers, without the body. A
//! *permit* counts towards a limit until it is dropped.

use crate::activity_report::ActivityReport;
use crate::fault::RequestFault;
use crate::function::Function;
use crate::guest_body::ResponseBody;
use crate::head_timeout::{HeadTimeout, InFlightRequests};
use crate::server::{FunctionServer, REQUEST_ID_HEADER, fault_response};
use crate::write_timeout::WriteTimeout;
use bytes::Bytes;
use hyper::body::Body;
use hyper::header::{HOST, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use jiffy_http::headers::{confine_answer, confine_function_request};
use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::function::{DirectAccess, DirectActivity, DirectClosed, DirectConnection};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::TcpStream as StdTcpStream;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};

/// Timeout for the head of each request. Also limits the idle time between requests, since an idle
/// connection occupies one of the process's limited connections.
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum time for which a write may make no progress.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum length of a request's head in bytes.
const MAX_HEAD_BYTES: usize = 64 << 10;
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Socket on which the daemon passes connections to this process.
pub(crate) struct DirectLink {
    socket: AsyncFd<Channel>,
    server: FunctionServer,
    permits: Arc<Semaphore>,
    /// True until the daemon disconnects. The tasks that watch this value then close their
    /// connections.
    open: watch::Sender<bool>,
}

/// Client of a connection, and the function and host of its first request.
#[derive(Debug)]
pub struct DirectClient {
    function: String,
    host: HeaderValue,
    address: HeaderValue,
}

/// Serves the connections received on `socket`. Must be called inside a runtime.
pub(crate) fn attach(
    server: &FunctionServer,
    permits: &Arc<Semaphore>,
    socket: OwnedFd,
) -> io::Result<()> {
    fcntl(&socket, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let link = DirectLink {
        // SAFETY: a channel owns its descriptor, and keeps the descriptor open until it is dropped.
        socket: unsafe { AsyncFd::register(Channel::new(socket)) }?,
        server: server.clone(),
        permits: permits.clone(),
        open: watch::Sender::new(true),
    };
    tokio::spawn(Arc::new(link).serve());
    Ok(())
}

impl DirectLink {
    /// Accepts connections until the daemon disconnects.
    async fn serve(self: Arc<Self>) {
        // A message with a connection carries its socket as a file descriptor.
        while let Ok((connection, mut files)) = self.receive().await {
            let link = self.clone();
            let (permit, file) = (self.permits.clone().try_acquire_owned(), files.pop());
            tokio::spawn(async move {
                let id = connection.id;
                // A connection without a permit is closed.
                if let (Ok(_permit), Some(file)) = (permit, file) {
                    // The connection was closed or failed: no further action is necessary.
                    let _ = link.connection(connection, file).await;
                }
                link.report_closed(id).await;
            });
        }
        // Connections end after their request in flight.
        self.open.send_replace(false);
    }

    async fn receive(&self) -> Result<(DirectConnection, Vec<OwnedFd>), ChannelError> {
        loop {
            let ready = self.socket.readable().await;
            let mut ready = ready.map_err(|_| ChannelError::Closed)?;
            match self.socket.get_ref().recv() {
                // The channel is non-blocking: `EAGAIN` means that no message has arrived.
                Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
                received => return received,
            }
        }
    }

    /// Reports the end of a connection. Waits if the socket's buffer is full: the daemon counts
    /// open connections, and must receive the report.
    async fn report_closed(&self, id: u64) {
        while let Ok(mut ready) = self.socket.writable().await {
            let sent = self.socket.get_ref().send(&DirectClosed { id }, &[]);
            match sent {
                Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
                _ => return,
            }
        }
    }

    /// Sends a report to the daemon. Returns false if the socket's buffer is full.
    fn report(&self, activity: DirectActivity) -> bool {
        let sent = self.socket.get_ref().send(&activity, &[]);
        !matches!(sent, Err(ChannelError::Io(Errno::EAGAIN)))
    }

    async fn connection(&self, connection: DirectConnection, file: OwnedFd) -> io::Result<()> {
        // This task subscribes before the connection is served, so that no change is missed.
        let open = self.open.subscribe();
        // `set_nonblocking` of the standard library uses `ioctl`, which the seccomp filter denies.
        fcntl(&file, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let stream = TcpStream::from_std(StdTcpStream::from(file))?;
        let client = DirectClient::new(&stream, connection.function, &connection.host)?;
        let id = connection.id;
        let report = |is_busy| self.report(DirectActivity { id, is_busy });
        serve_reporting(&self.server, stream, &client, open, report).await
    }
}

impl DirectClient {
    /// Creates the client of a connection to one function. `host` is the required host of each
    /// request.
    pub fn new(stream: &TcpStream, function: String, host: &str) -> io::Result<Self> {
        let address = stream.peer_addr()?.ip().to_canonical().to_string();
        Ok(Self {
            function,
            host: HeaderValue::from_str(host).map_err(io::Error::other)?,
            address: HeaderValue::from_str(&address).map_err(io::Error::other)?,
        })
    }

    /// Answers a request of a direct connection in the same way as the gateway.
    async fn answer<B>(
        &self,
        server: &FunctionServer,
        request: Request<B>,
    ) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let id = server.new_request_id();
        match self.find_function(server, &request) {
            Ok(function) => {
                let (mut head, body) = request.into_parts();
                rewrite(&mut head, self, &id);
                let request = Request::from_parts(head, body);
                let name = self.function.clone();
                let mut response = server.answer(name, &function, &id, request).await;
                // The function has a host name of its own (`None`): the other arguments have no
                // effect.
                confine_answer(response.headers_mut(), None, "", false);
                response
            }
            Err(fault) => {
                let mut response = fault_response(&fault);
                response.headers_mut().insert(REQUEST_ID_HEADER, id);
                response
            }
        }
    }

    /// Returns the function. Fails if the request names a host other than the connection's, or if
    /// the function does not permit direct requests.
    fn find_function<B>(
        &self,
        server: &FunctionServer,
        request: &Request<B>,
    ) -> Result<Arc<Function>, RequestFault> {
        let authority = request
            // A request in absolute form (`GET http://host/path`) names the host in its URI, which
            // takes precedence over the header.
            .uri()
            .authority()
            .map(|host| host.as_str().as_bytes());
        let header = || request.headers().get(HOST).map(HeaderValue::as_bytes);
        let host = authority.or_else(header).unwrap_or_default();
        if !host.eq_ignore_ascii_case(self.host.as_bytes()) {
            return Err(RequestFault::Misdirected);
        }
        let function = server.function(&self.function);
        let function = function.ok_or(RequestFault::NotFound)?;
        match function.deployment().access {
            DirectAccess::Public => Ok(function),
            DirectAccess::Disabled => Err(RequestFault::Disabled),
            DirectAccess::Hidden => Err(RequestFault::NotFound),
        }
    }
}

/// Serves a connection. When `open` becomes false, the connection ends after the request in flight.
pub async fn serve(
    server: &FunctionServer,
    stream: TcpStream,
    client: &DirectClient,
    open: watch::Receiver<bool>,
) -> io::Result<()> {
    serve_reporting(server, stream, client, open, |_| true).await
}

/// Like [`serve`], but calls `report` with true when the connection becomes busy and with false
/// when it becomes idle. Retries a report for which `report` returned false.
async fn serve_reporting(
    server: &FunctionServer,
    stream: TcpStream,
    client: &DirectClient,
    mut open: watch::Receiver<bool>,
    report: impl FnMut(bool) -> bool + Unpin,
) -> io::Result<()> {
    let in_flight = InFlightRequests::default();
    let service = service_fn(|request| async {
        let in_flight_request = in_flight.enter();
        let response = client.answer(server, request).await;
        Ok::<_, Infallible>(response.map(|body| body.until_sent(&in_flight_request)))
    });
    // The outer wrapper limits the time of reads, the inner one the time of writes.
    let stream = WriteTimeout::new(stream, WRITE_TIMEOUT);
    let stream = HeadTimeout::new(stream, HEAD_TIMEOUT, in_flight.clone());
    let mut report = ActivityReport::new(in_flight.clone(), report);
    let served = http1::Builder::new()
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut served = pin!(served);
    let closed = async {
        // A dropped sender has the same effect as `false`.
        drop(open.wait_for(|open| !open).await);
    };
    let ended = tokio::select! {
        biased;
        ended = served.as_mut() => ended,
        // The report is polled after the connection, because `poll` reads its state.
        () = poll_fn(|context| report.poll(context)) => Ok(()),
        () = closed => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    ended.map_err(io::Error::other)
}

/// Rewrites the head of a client's request for the guest.
fn rewrite(head: &mut Parts, client: &DirectClient, id: &HeaderValue) {
    // A guest receives the path only, also if the client sent an absolute URI.
    if head.uri.authority().is_some() && head.method != Method::CONNECT {
        let path = head.uri.path_and_query().cloned();
        head.uri = path.map(Uri::from).unwrap_or_default();
    }
    let headers = &mut head.headers;
    confine_function_request(headers);
    headers.insert(HOST, client.host.clone());
    headers.insert(X_FORWARDED_HOST, client.host.clone());
    headers.insert(X_FORWARDED_FOR, client.address.clone());
    // The daemon accepts direct connections without TLS only.
    headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("http"));
    headers.insert(REQUEST_ID_HEADER, id.clone());
}
