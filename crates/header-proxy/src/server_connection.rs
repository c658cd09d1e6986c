//! Connection of the proxy to the server that a guest addresses, with verification of its
//! certificate.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use jiffy_network::{GuestStream, ServerConnector};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::TlsConnector;

use crate::task_set::TaskSet;
use crate::verdict::Rejection;

/// Timeout of a TLS handshake.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of the head of a response in bytes.
pub(crate) const MAX_HEAD_BYTES: usize = 64 * 1024;
/// Maximum number of headers of a message.
pub(crate) const MAX_HEADERS: usize = 128;
/// Window of one stream and of a connection in HTTP/2, in bytes.
pub(crate) const STREAM_WINDOW: u32 = 128 * 1024;
pub(crate) const CONNECTION_WINDOW: u32 = 256 * 1024;

/// Sender of requests: HTTP/1.1 (`One`) or HTTP/2 (`Two`).
enum Sender {
    One(http1::SendRequest<Incoming>),
    Two(http2::SendRequest<Incoming>),
}

/// Server of the requests of one connection of the guest.
pub(crate) struct Server {
    connector: Arc<dyn ServerConnector>,
    host: String,
    /// TLS settings. `None` for plain HTTP.
    tls: Option<Arc<ClientConfig>>,
    /// True if the server must use HTTP/2, and false for HTTP/1.1.
    is_http2: bool,
    tasks: TaskSet,
    sender: tokio::sync::Mutex<Option<Sender>>,
}

/// Opened connection to a server, before the first request.
pub(crate) struct OpenedServer {
    stream: Box<dyn GuestStream>,
    pub is_http2: bool,
}

/// Connects to the server. Verifies its certificate for `host` if `tls` is given.
pub(crate) async fn open(
    connector: &dyn ServerConnector,
    host: &str,
    tls: Option<&Arc<ClientConfig>>,
) -> Result<OpenedServer, Rejection> {
    let stream = connector.connect().await;
    let stream = stream.ok_or_else(|| Rejection::Server(format!("{host} is unreachable")))?;
    let Some(settings) = tls else {
        return Ok(OpenedServer {
            stream,
            is_http2: false,
        });
    };
    let failed = |why: String| Rejection::Server(format!("cannot verify {host}: {why}"));
    let name = ServerName::try_from(host.to_owned());
    let name = name.map_err(|_| failed("its name is invalid".to_owned()))?;
    let handshake = TlsConnector::from(settings.clone()).connect(name, stream);
    let stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await;
    let stream = stream.map_err(|_| failed("it does not respond".to_owned()))?;
    let stream = stream.map_err(|e| failed(e.to_string()))?;
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    Ok(OpenedServer {
        stream: Box::new(stream),
        is_http2,
    })
}

impl Server {
    /// Uses an opened connection, and further ones when the server closes it.
    pub async fn new(
        opened: OpenedServer,
        connector: Arc<dyn ServerConnector>,
        host: String,
        tls: Option<Arc<ClientConfig>>,
        tasks: TaskSet,
    ) -> Result<Self, Rejection> {
        let server = Self {
            connector,
            host,
            tls,
            is_http2: opened.is_http2,
            tasks,
            sender: tokio::sync::Mutex::default(),
        };
        let sender = server.start(opened.stream).await?;
        *server.sender.lock().await = Some(sender);
        Ok(server)
    }

    /// Returns the rejection for an error of the connection to the server, with all causes of the
    /// error.
    fn failed(&self, error: &dyn std::error::Error) -> Rejection {
        let mut text = format!("{} failed: {error}", self.host);
        let mut cause = error.source();
        while let Some(error) = cause {
            text += &format!(": {error}");
            cause = error.source();
        }
        Rejection::Server(text)
    }

    /// Performs the HTTP handshake on a connection to the server, with HTTP/2 if TLS has negotiated
    /// it.
    async fn start(&self, stream: Box<dyn GuestStream>) -> Result<Sender, Rejection> {
        let io = TokioIo::new(stream);
        if self.is_http2 {
            let mut builder = http2::Builder::new(self.tasks.clone());
            builder
                .timer(TokioTimer::new())
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .max_header_list_size(u32::try_from(MAX_HEAD_BYTES).unwrap_or(u32::MAX));
            let (sender, connection) = builder.handshake(io).await.map_err(|e| self.failed(&e))?;
            self.tasks.spawn(async move { drop(connection.await) });
            return Ok(Sender::Two(sender));
        }
        let mut builder = http1::Builder::new();
        builder
            .max_buf_size(MAX_HEAD_BYTES)
            .max_headers(MAX_HEADERS)
            .preserve_header_case(true);
        let (sender, connection) = builder.handshake(io).await.map_err(|e| self.failed(&e))?;
        let connection = connection.with_upgrades();
        self.tasks.spawn(async move { drop(connection.await) });
        Ok(Sender::One(sender))
    }

    /// Connects again, because the server has closed the previous connection.
    async fn reconnect(&self) -> Result<Sender, Rejection> {
        let opened = open(&*self.connector, &self.host, self.tls.as_ref()).await?;
        if opened.is_http2 != self.is_http2 {
            let why = format!("{} has changed its version of HTTP", self.host);
            return Err(Rejection::Server(why));
        }
        self.start(opened.stream).await
    }

    /// Sends a request. A request that was certainly not sent is repeated once on another
    /// connection.
    pub async fn send(&self, request: Request<Incoming>) -> Result<Response<Incoming>, Rejection> {
        let mut request = request;
        let mut is_repeated = false;
        loop {
            let answer = {
                let mut held = self.sender.lock().await;
                let is_ready = match held.as_mut() {
                    Some(Sender::One(sender)) => sender.ready().await.is_ok(),
                    Some(Sender::Two(sender)) => sender.ready().await.is_ok(),
                    None => false,
                };
                if !is_ready {
                    *held = None;
                    *held = Some(self.reconnect().await?);
                }
                // The lock is released while the response is awaited, because requests of HTTP/2
                // are concurrent.
                match held.as_mut() {
                    Some(Sender::One(sender)) => Answer::One(sender.try_send_request(request)),
                    Some(Sender::Two(sender)) => Answer::Two(sender.try_send_request(request)),
                    None => return Err(Rejection::Server(format!("{} is closed", self.host))),
                }
            };
            let answer = match answer {
                Answer::One(answer) => answer.await,
                Answer::Two(answer) => answer.await,
            };
            match answer {
                Ok(response) => return Ok(response),
                Err(mut e) => match e.take_message() {
                    Some(unsent) if !is_repeated => {
                        is_repeated = true;
                        request = unsent;
                    }
                    _ => return Err(self.failed(e.error())),
                },
            }
        }
    }
}

/// Response that is awaited, of the sender with the same name.
enum Answer<A, B> {
    One(A),
    Two(B),
}
