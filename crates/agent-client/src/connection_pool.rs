//! Pool of HTTP connections to one server. A connection is reused after its response was read to
//! the end.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use crate::error::ClientError;
use crate::request_body::RequestBody;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::upgrade::OnUpgrade;
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};

/// Maximum number of idle connections.
const MAX_IDLE: usize = 16;

/// Byte stream in both directions, over any transport.
trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn ByteStream>>> + Send>>;
type Connector = Box<dyn Fn() -> Connecting + Send + Sync>;

/// Pool of connections to one server. Clones refer to the same pool.
#[derive(Clone)]
pub struct ConnectionPool(Arc<PoolShared>);

impl ConnectionPool {
    /// Creates a pool that opens connections with `connector` if no connection is idle.
    pub fn new<F, Fut, S>(connector: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let connector = move || -> Connecting {
            let opening = connector();
            Box::pin(async move { Ok(Box::new(opening.await?) as Box<dyn ByteStream>) })
        };
        Self(Arc::new(PoolShared {
            connector: Box::new(connector),
            idle: Mutex::default(),
        }))
    }

    /// Adds `stream`, which is already connected, to the idle connections.
    pub async fn add(
        &self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> Result<(), ClientError> {
        let sender = open_http(Box::new(stream)).await?;
        self.0.put_idle(sender);
        Ok(())
    }

    /// Sends a request, which must have a `Host` header, and waits for the head of its response.
    pub async fn send(&self, request: Request<RequestBody>) -> Result<PooledResponse, ClientError> {
        self.0.send(request).await
    }
}

/// Starts HTTP on a new stream.
async fn open_http(stream: Box<dyn ByteStream>) -> Result<SendRequest<RequestBody>, ClientError> {
    let (sender, connection) = http1::Builder::new()
        // Large enough for throughput. It also bounds the head of a response.
        .max_buf_size(256 * 1024)
        .handshake(TokioIo::new(stream))
        .await?;
    tokio::spawn(async move {
        // Ignore the error: the request that waits for a response fails as well.
        let _ = connection.with_upgrades().await;
    });
    Ok(sender)
}

/// State of a pool: connector and idle connections.
struct PoolShared {
    connector: Connector,
    idle: Mutex<Vec<SendRequest<RequestBody>>>,
}

impl PoolShared {
    /// Adds a connection to the idle connections. Closes the connection if the pool has
    /// [`MAX_IDLE`] idle connections.
    fn put_idle(&self, sender: SendRequest<RequestBody>) {
        let mut idle = self.idle.lock();
        // If the pool is full, the sender is dropped, which closes the connection.
        if idle.len() < MAX_IDLE {
            idle.push(sender);
        }
    }

    /// Takes an idle connection that is still open. `None` if there is none.
    async fn idle(&self) -> Option<SendRequest<RequestBody>> {
        loop {
            // The lock is released at the end of this statement, before waiting.
            let mut sender = self.idle.lock().pop()?;
            // The server may have closed the connection meanwhile.
            if sender.ready().await.is_ok() {
                return Some(sender);
            }
        }
    }

    /// Opens a new connection.
    async fn open(&self) -> Result<SendRequest<RequestBody>, ClientError> {
        open_http((self.connector)().await?).await
    }

    /// Sends a request and waits for the head of its response.
    async fn send(
        self: &Arc<Self>,
        mut request: Request<RequestBody>,
    ) -> Result<PooledResponse, ClientError> {
        loop {
            let reused = self.idle().await;
            // Only a reused connection may have been closed by the server before the request.
            let fresh = reused.is_none();
            let mut sender = match reused {
                Some(sender) => sender,
                None => self.open().await?,
            };
            match sender.try_send_request(request).await {
                Ok(response) => {
                    let (mut head, body) = response.into_parts();
                    return Ok(PooledResponse {
                        status: head.status,
                        headers: head.headers,
                        upgrade: head.extensions.remove(),
                        body,
                        sender: Some(sender),
                        pool: Arc::clone(self),
                    });
                }
                Err(mut failed) => match failed.take_message() {
                    // The idle connection was closed before a byte was sent. Repeat the request on
                    // another connection.
                    Some(message) if !fresh => request = message,
                    _ => return Err(failed.into_error().into()),
                },
            }
        }
    }
}

/// Response whose body is being read. If it is dropped before the end of the body, its connection
/// is closed.
pub struct PooledResponse {
    /// HTTP status.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    upgrade: Option<OnUpgrade>,
    body: Incoming,
    sender: Option<SendRequest<RequestBody>>,
    pool: Arc<PoolShared>,
}

impl PooledResponse {
    /// Returns the next bytes, or `None` at the end. The connection is then idle again.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        // Trailers have no data and are skipped.
        while let Some(frame) = self.body.frame().await {
            if let Ok(data) = frame?.into_data() {
                return Ok(Some(data));
            }
        }
        // The body is complete, so the connection can serve the next request.
        if let Some(sender) = self.sender.take() {
            self.pool.put_idle(sender);
        }
        Ok(None)
    }

    /// Returns the byte stream after an upgrade (101). Otherwise returns the response itself.
    pub async fn into_upgraded(
        mut self,
    ) -> Result<Result<impl AsyncRead + AsyncWrite + Send + Unpin, Box<Self>>, ClientError> {
        match self.upgrade.take() {
            Some(upgrade) if self.status == StatusCode::SWITCHING_PROTOCOLS => {
                // The connection now carries the stream and does not return to the pool.
                Ok(Ok(TokioIo::new(upgrade.await?)))
            }
            _ => Ok(Err(Box::new(self))),
        }
    }

    /// Reads the whole response of at most `limit` bytes.
    pub async fn collect(mut self, limit: usize) -> Result<Bytes, ClientError> {
        let Some(first) = self.next().await? else {
            return Ok(Bytes::new());
        };
        if first.len() > limit {
            return Err(ClientError::TooLarge { limit });
        }
        // A body of one piece, the usual case, is returned without copying.
        let mut all: Option<Vec<u8>> = None;
        while let Some(piece) = self.next().await? {
            let all = all.get_or_insert_with(|| first.to_vec());
            if all.len() + piece.len() > limit {
                return Err(ClientError::TooLarge { limit });
            }
            all.extend_from_slice(&piece);
        }
        Ok(all.map_or(first, Bytes::from))
    }
}
