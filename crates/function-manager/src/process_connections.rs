//! Connections to a process that wait for the next request.

use crate::request_body::{BoxError, RequestBody};
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::Builder;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use jiffy_upstream::UpstreamConnection;
use parking_lot::Mutex;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

/// Connections that wait for requests. A process accepts far more at once.
const MAX_IDLE: usize = 256;
/// Time for which one waits; the process closes it after 60 s.
const MAX_IDLE_TIME: Duration = Duration::from_secs(30);
/// Time between looks for those that have waited long enough.
const CLOSE_INTERVAL: Duration = Duration::from_secs(5);

/// Time for a connection to become ready after a response.
const READY_TIMEOUT: Duration = Duration::from_secs(1);

type Connection = UpstreamConnection<RequestBody>;

/// Connections to the socket of a process.
#[derive(Debug)]
pub(crate) struct ProcessConnections {
    socket: PathBuf,
    idle: Mutex<IdleConnections>,
}

#[derive(Debug, Default)]
struct IdleConnections {
    /// With the time since which each waits, in order of that.
    waiting: Vec<(Connection, Instant)>,
    closing: bool,
}

impl ProcessConnections {
    pub(crate) fn new(socket: PathBuf) -> Arc<Self> {
        let idle = Mutex::default();
        Arc::new(Self { socket, idle })
    }

    /// Sends a request and waits, without limit, for the head of the response. One that was not
    /// sent on a connection that has waited is sent on a fresh one.
    pub(crate) async fn send(
        self: &Arc<Self>,
        mut request: Request<RequestBody>,
    ) -> Result<Response<ConnectionBody>, BoxError> {
        let whole = request.body().is_end_stream();
        while let Some(mut connection) = self.take() {
            match connection.send(request, whole).await {
                Ok(response) => return Ok(self.body(response, connection)),
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(error.into_error().into()),
                },
            }
        }
        let stream = UnixStream::connect(&self.socket).await?;
        let handshake = Builder::new().handshake(TokioIo::new(stream)).await?;
        let mut connection = Connection::new(handshake);
        match connection.send(request, whole).await {
            Ok(response) => Ok(self.body(response, connection)),
            Err(error) => Err(error.into_error().into()),
        }
    }

    fn body(
        self: &Arc<Self>,
        response: Response<Incoming>,
        connection: Connection,
    ) -> Response<ConnectionBody> {
        response.map(|inner| {
            let mut body = ConnectionBody {
                inner,
                connection: Some(connection),
                connections: self.clone(),
            };
            body.finish_if_ended();
            body
        })
    }

    fn take(&self) -> Option<Connection> {
        loop {
            let (mut connection, _) = self.idle.lock().waiting.pop()?;
            if connection.is_ready() {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection whose response is complete, once it is ready for a request.
    fn give_back(self: &Arc<Self>, mut connection: Connection) {
        if connection.is_ready() {
            return self.keep(connection);
        }
        // The request's body may still be on its way.
        let connections = self.clone();
        tokio::spawn(async move {
            if let Ok(true) = timeout(READY_TIMEOUT, connection.ready()).await {
                connections.keep(connection);
            }
        });
    }

    fn keep(self: &Arc<Self>, connection: Connection) {
        let mut idle = self.idle.lock();
        if idle.waiting.len() < MAX_IDLE {
            idle.waiting.push((connection, Instant::now()));
            if !idle.closing {
                idle.closing = true;
                tokio::spawn(close_idle(Arc::downgrade(self)));
            }
        }
    }
}

/// Closes connections that have waited long enough, until none waits.
async fn close_idle(connections: Weak<ProcessConnections>) {
    loop {
        sleep(CLOSE_INTERVAL).await;
        let Some(connections) = connections.upgrade() else {
            return;
        };
        let mut idle = connections.idle.lock();
        let is_old = |(_, since): &(Connection, Instant)| since.elapsed() >= MAX_IDLE_TIME;
        let old = idle
            .waiting
            .iter()
            .take_while(|waiting| is_old(waiting))
            .count();
        let old: Vec<_> = idle.waiting.drain(..old).collect();
        idle.closing = !idle.waiting.is_empty();
        let is_done = !idle.closing;
        drop(idle);
        drop(old);
        if is_done {
            return;
        }
    }
}

/// Body of a response. Dropped before its end it closes the connection; at its end the connection
/// waits for the next request.
#[derive(Debug)]
pub(crate) struct ConnectionBody {
    inner: Incoming,
    connection: Option<Connection>,
    connections: Arc<ProcessConnections>,
}

impl ConnectionBody {
    /// Lets the connection go as soon as nothing more of the response comes on it.
    fn finish_if_ended(&mut self) {
        if self.inner.is_end_stream()
            && let Some(connection) = self.connection.take()
        {
            self.connections.give_back(connection);
        }
    }
}

impl Body for ConnectionBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = &mut *self;
        let polled = match &mut this.connection {
            Some(connection) => connection.poll_frame(&mut this.inner, context),
            None => Pin::new(&mut this.inner).poll_frame(context),
        };
        match &polled {
            Poll::Ready(Some(Err(_))) => this.connection = None,
            // It is not polled again once its announced length is there.
            Poll::Ready(_) => this.finish_if_ended(),
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
