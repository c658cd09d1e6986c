//! Connections to one server, used again when an answer was read to its end.

use crate::body::Outgoing;
use crate::error::ClientError;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::upgrade::OnUpgrade;
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncRead, AsyncWrite};

/// Most connections that wait for their next use.
const MAX_IDLE: usize = 16;

/// A stream of bytes both ways, whatever carries it.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send>>;
type Connector = Box<dyn Fn() -> Connecting + Send + Sync>;

/// Connections over which one server is asked, kept for the next request. Clones share them.
#[derive(Clone)]
pub struct Connections(Arc<Pool>);

impl Connections {
    /// Connections that `connector` opens when there is none that waits.
    pub fn new<F, Fut, S>(connector: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let connector = move || -> Connecting {
            let opening = connector();
            Box::pin(async move { Ok(Box::new(opening.await?) as Box<dyn Stream>) })
        };
        Self(Arc::new(Pool {
            connector: Box::new(connector),
            idle: Mutex::default(),
        }))
    }

    /// Uses `stream`, which is open already, for the next request.
    pub async fn keep(
        &self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> Result<(), ClientError> {
        let sender = begin(Box::new(stream)).await?;
        self.0.rest(sender);
        Ok(())
    }

    /// Sends a request, which names its host, and waits for the head of its answer.
    pub async fn send(&self, request: Request<Outgoing>) -> Result<Answer, ClientError> {
        self.0.send(request).await
    }
}

/// Speaks HTTP over a fresh stream.
async fn begin(stream: Box<dyn Stream>) -> Result<SendRequest<Outgoing>, ClientError> {
    let (sender, connection) = http1::Builder::new()
        .max_buf_size(256 * 1024)
        .handshake(TokioIo::new(stream))
        .await?;
    tokio::spawn(async move {
        // Whoever waits for an answer learns of the failure there.
        let _ = connection.with_upgrades().await;
    });
    Ok(sender)
}

/// Opens and keeps connections.
struct Pool {
    connector: Connector,
    idle: Mutex<Vec<SendRequest<Outgoing>>>,
}

impl Pool {
    /// Lets a connection wait for its next use.
    fn rest(&self, sender: SendRequest<Outgoing>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(sender);
        }
    }

    async fn idle(&self) -> Option<SendRequest<Outgoing>> {
        loop {
            let mut sender = self
                .idle
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop()?;
            // One that the other side closed meanwhile says so here.
            if sender.ready().await.is_ok() {
                return Some(sender);
            }
        }
    }

    async fn open(&self) -> Result<SendRequest<Outgoing>, ClientError> {
        begin((self.connector)().await?).await
    }

    /// Sends a request and waits for the head of its answer.
    async fn send(self: &Arc<Self>, mut request: Request<Outgoing>) -> Result<Answer, ClientError> {
        loop {
            let reused = self.idle().await;
            let fresh = reused.is_none();
            let mut sender = match reused {
                Some(sender) => sender,
                None => self.open().await?,
            };
            match sender.try_send_request(request).await {
                Ok(response) => {
                    let (mut head, body) = response.into_parts();
                    return Ok(Answer {
                        status: head.status,
                        headers: head.headers,
                        upgrade: head.extensions.remove(),
                        body,
                        sender: Some(sender),
                        pool: Arc::clone(self),
                    });
                }
                Err(mut failed) => match failed.take_message() {
                    // The old connection closed before anything was sent: another one will do.
                    Some(message) if !fresh => request = message,
                    _ => return Err(failed.into_error().into()),
                },
            }
        }
    }
}

/// An answer that is being read.
pub struct Answer {
    /// HTTP status.
    pub status: StatusCode,
    /// Header lines.
    pub headers: HeaderMap,
    upgrade: Option<OnUpgrade>,
    body: Incoming,
    sender: Option<SendRequest<Outgoing>>,
    pool: Arc<Pool>,
}

impl Answer {
    /// The next bytes; `None` at the end, after which the connection is free again.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        while let Some(frame) = self.body.frame().await {
            if let Ok(data) = frame?.into_data() {
                return Ok(Some(data));
            }
        }
        if let Some(sender) = self.sender.take() {
            self.pool.rest(sender);
        }
        Ok(None)
    }

    /// The stream that HTTP was left for, if the answer says so (101); otherwise the answer is given back.
    pub async fn switched(
        mut self,
    ) -> Result<Result<impl AsyncRead + AsyncWrite + Send + Unpin, Box<Self>>, ClientError> {
        match self.upgrade.take() {
            Some(upgrade) if self.status == StatusCode::SWITCHING_PROTOCOLS => {
                Ok(Ok(TokioIo::new(upgrade.await?)))
            }
            _ => Ok(Err(Box::new(self))),
        }
    }

    /// All of it, at most `limit` bytes.
    pub async fn collect(mut self, limit: usize) -> Result<Bytes, ClientError> {
        let Some(first) = self.next().await? else {
            return Ok(Bytes::new());
        };
        if first.len() > limit {
            return Err(ClientError::TooLarge { limit });
        }
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
