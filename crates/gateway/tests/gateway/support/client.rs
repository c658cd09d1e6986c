//! Clients: an HTTP client, and a client that writes raw bytes.

use super::{ID, with_timeout};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::convert::Infallible;
use std::net::SocketAddr;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Returns a request body.
pub fn body(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).boxed_unsync()
}

/// Returns a request to a port of the sandbox, addressed by headers.
pub fn to(port: u16, path: &str) -> hyper::http::request::Builder {
    Request::builder()
        .uri(path)
        .header("host", "127.0.0.1")
        .header("e2b-sandbox-id", ID)
        .header("e2b-sandbox-port", port)
}

/// Returns a GET request to a port of the sandbox, addressed by headers.
pub fn get(port: u16, path: &str) -> Request<Body> {
    to(port, path).body(body("")).unwrap()
}

/// HTTP/1.1 connection to the gateway.
pub struct Http1 {
    pub sender: http1::SendRequest<Body>,
    pub driver: JoinHandle<()>,
}

impl Http1 {
    pub async fn new(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).await.unwrap()).await
    }

    pub async fn over<T>(stream: T) -> Self
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        let driver = tokio::spawn(async move {
            let _ = connection.with_upgrades().await;
        });
        Self { sender, driver }
    }

    pub async fn send(&mut self, request: Request<Body>) -> Response<Incoming> {
        with_timeout(self.sender.ready()).await.unwrap();
        with_timeout(self.sender.send_request(request))
            .await
            .unwrap()
    }

    /// Closes the connection immediately.
    pub fn hang_up(self) {
        self.driver.abort();
    }
}

/// HTTP/2 connection to the gateway.
pub struct Http2 {
    pub sender: http2::SendRequest<Body>,
}

impl Http2 {
    pub async fn over<T>(stream: T) -> Self
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(async move {
            let _ = connection.await;
        });
        Self { sender }
    }

    pub async fn send(&mut self, request: Request<Body>) -> Response<Incoming> {
        with_timeout(self.sender.ready()).await.unwrap();
        with_timeout(self.sender.send_request(request))
            .await
            .unwrap()
    }
}

/// Sends one request on a new connection. Returns status and text.
pub async fn send_request(address: SocketAddr, request: Request<Body>) -> (u16, String) {
    let answer = Http1::new(address).await.send(request).await;
    (
        answer.status().as_u16(),
        super::collected(answer.into_body()).await,
    )
}

/// Connection on which the test writes raw bytes.
pub struct Raw(pub TcpStream);

impl Raw {
    pub async fn new(address: SocketAddr) -> Self {
        Self(TcpStream::connect(address).await.unwrap())
    }

    pub async fn write_text(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    /// Reads until `end` was received.
    pub async fn until(&mut self, end: &str) -> String {
        let mut received = Vec::new();
        let reading = async {
            while !received.ends_with(end.as_bytes()) {
                received.push(self.0.read_u8().await.unwrap());
            }
        };
        if tokio::time::timeout(super::STEP_TIMEOUT, reading)
            .await
            .is_err()
        {
            panic!("received only {:?}", String::from_utf8_lossy(&received));
        }
        String::from_utf8(received).unwrap()
    }

    /// Reads until the gateway closes the connection.
    pub async fn rest(&mut self) -> String {
        let mut received = Vec::new();
        // A reset counts as a close.
        let _ = with_timeout(self.0.read_to_end(&mut received)).await;
        String::from_utf8(received).unwrap()
    }
}
