//! [`PooledBody`]: the body of a response. Its connection returns to the pool when the body was
//! read.

use crate::{ConnectionPool, PooledConnection};
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use std::hash::Hash;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Body of a response. At its end, the connection returns to the pool. If the body is dropped
/// before its end, the connection is closed.
#[derive(Debug)]
pub struct PooledBody<K, B, T> {
    inner: Incoming,
    pool: Arc<ConnectionPool<K, B, T>>,
    connection: Option<PooledConnection<K, B, T>>,
}

impl<K, B, T> PooledBody<K, B, T>
where
    K: Clone + Eq + Hash + Send + 'static,
    B: Send + 'static,
    T: Send + 'static,
{
    /// Creates the body of a response on `connection`.
    pub fn new(
        inner: Incoming,
        pool: Arc<ConnectionPool<K, B, T>>,
        connection: PooledConnection<K, B, T>,
    ) -> Self {
        let mut body = Self {
            inner,
            pool,
            connection: Some(connection),
        };
        if body.inner.is_end_stream() {
            body.finish();
        }
        body
    }

    /// Returns the connection to the pool. Later calls have no effect.
    fn finish(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.pool.give_back(connection);
        }
    }
}

impl<K, B, T> Body for PooledBody<K, B, T>
where
    K: Clone + Eq + Hash + Send + Unpin + 'static,
    B: Send + 'static,
    T: Send + Unpin + 'static,
{
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        let polled = match &mut this.connection {
            Some(pooled) => pooled.connection.poll_frame(&mut this.inner, context),
            None => Pin::new(&mut this.inner).poll_frame(context),
        };
        match &polled {
            // The body is not polled again after trailers, or after its announced length was
            // received.
            Poll::Ready(Some(Ok(frame))) if frame.is_trailers() || this.inner.is_end_stream() => {
                this.finish();
            }
            // The state of the connection is unknown: close it.
            Poll::Ready(Some(Err(_))) => this.connection = None,
            Poll::Ready(None) => this.finish(),
            Poll::Ready(Some(Ok(_))) | Poll::Pending => {}
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
