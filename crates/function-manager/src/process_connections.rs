//! Pool of the daemon's HTTP connections to the socket of one owner's process.
//!
//! The *head* of a request or response is its first line and its headers, without the body. The
//! *epoch* of a pool counts the calls of `invalidate`. A connection that was opened in an earlier
//! epoch is closed after use.

use crate::request_body::{BoxError, RequestBody};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::Builder;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use jiffy_http::{ConnectionPool, PoolLimits, PooledBody, PooledConnection, UpstreamConnection};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;

const LIMITS: PoolLimits = PoolLimits {
    // The process closes a connection after 60 s.
    idle_time: Duration::from_secs(30),
    check_interval: Duration::from_secs(5),
    // The limit of connections that a process accepts is far higher.
    idle_per_key: 256,
    idle: 256,
};

/// Connection in the pool. Its key is `()`, since all connections of a pool have the same socket.
/// Its guard is `()`, since no permit must be released when a connection is closed.
type Connection = PooledConnection<(), RequestBody, ()>;
/// Body of a response.
pub(crate) type ConnectionBody = PooledBody<(), RequestBody, ()>;

/// Connections to the socket of a process, reused by consecutive requests.
#[derive(Debug)]
pub(crate) struct ProcessConnections {
    socket: PathBuf,
    pool: Arc<ConnectionPool<(), RequestBody, ()>>,
}

impl ProcessConnections {
    pub(crate) fn new(socket: PathBuf) -> Arc<Self> {
        let pool = ConnectionPool::new(LIMITS);
        Arc::new(Self { socket, pool })
    }

    /// Sends a request and waits, without limit, for the head of the response. If the process
    /// closed an idle connection before the request was sent on it, another connection is used.
    pub(crate) async fn send(
        &self,
        mut request: Request<RequestBody>,
    ) -> Result<Response<ConnectionBody>, BoxError> {
        let has_no_body = request.body().is_end_stream();
        // Any idle time is accepted (`Duration::MAX`), because the pool itself removes expired
        // connections. The process may still have closed an idle connection at its own timeout.
        while let Some(mut pooled) = self.pool.take(&(), Duration::MAX) {
            match pooled.connection.send(request, has_no_body).await {
                Ok(response) => return Ok(self.body(response, pooled)),
                Err(mut error) => match error.take_message() {
                    // No byte of the request was sent, so that it can be repeated.
                    Some(unsent) => request = unsent,
                    None => return Err(error.into_error().into()),
                },
            }
        }
        let stream = UnixStream::connect(&self.socket).await?;
        let handshake = Builder::new().handshake(TokioIo::new(stream)).await?;
        let connection = UpstreamConnection::new(handshake);
        // The epoch detects calls of `invalidate` while a connection is being opened. This pool is
        // never invalidated, so the epoch may be read after the connection was opened.
        let mut pooled = PooledConnection::new(connection, (), self.pool.epoch(), ());
        match pooled.connection.send(request, has_no_body).await {
            Ok(response) => Ok(self.body(response, pooled)),
            Err(error) => Err(error.into_error().into()),
        }
    }

    fn body(
        &self,
        response: Response<Incoming>,
        connection: Connection,
    ) -> Response<ConnectionBody> {
        response.map(|inner| PooledBody::new(inner, self.pool.clone(), connection))
    }
}
