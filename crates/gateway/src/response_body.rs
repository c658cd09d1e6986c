//! Bodies of answers, from the guest to the client.

use crate::body::{Body, BoxError, count};
use crate::counters::GatewayCounters;
use crate::in_flight_exchange::InFlightExchange;
use crate::pool::{GuestConnection, GuestConnectionPool};
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// Body of a guest's answer in transit to the client. Dropped before its end (the client is gone)
/// it closes the connection to the guest; at its end the connection goes back to the pool.
#[derive(Debug)]
pub struct ClientResponseBody {
    inner: Incoming,
    counters: Arc<GatewayCounters>,
    pool: Arc<GuestConnectionPool>,
    connection: Option<GuestConnection>,
    /// The guest broke off; told when what it sent before is on its way.
    broken_off: Option<hyper::Error>,
    _in_flight: InFlightExchange,
}

impl ClientResponseBody {
    pub(crate) fn new(
        inner: Incoming,
        counters: Arc<GatewayCounters>,
        pool: Arc<GuestConnectionPool>,
        connection: GuestConnection,
        in_flight: InFlightExchange,
    ) -> Self {
        let mut body = Self {
            inner,
            counters,
            pool,
            connection: Some(connection),
            broken_off: None,
            _in_flight: in_flight,
        };
        if body.inner.is_end_stream() {
            body.finish();
        }
        body
    }

    fn finish(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.pool.give_back(connection);
        }
    }
}

impl HttpBody for ClientResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(e) = self.broken_off.take() {
            return Poll::Ready(Some(Err(e.into())));
        }
        let this = &mut *self;
        let polled = match &mut this.connection {
            Some(guest) => guest.connection.poll_frame(&mut this.inner, cx),
            None => Pin::new(&mut this.inner).poll_frame(cx),
        };
        match ready!(polled) {
            Some(Ok(frame)) => {
                count(&self.counters.bytes_to_clients, &frame);
                // The body is not polled again after trailers, or once its announced length is
                // there.
                if frame.is_trailers() || self.inner.is_end_stream() {
                    self.finish();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(e)) => {
                self.connection = None;
                // The server flushes when there is nothing more for now, and not after an error.
                self.broken_off = Some(e);
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            None => {
                self.finish();
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Body that breaks off when a future ends.
pub struct BodyUntil<F> {
    inner: Body,
    end: Pin<Box<F>>,
}

impl<F> BodyUntil<F> {
    pub(crate) const fn new(inner: Body, end: Pin<Box<F>>) -> Self {
        Self { inner, end }
    }
}

impl<F: Future<Output = ()>> HttpBody for BodyUntil<F> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.end.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the link is not valid any more".into())));
        }
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Any body that keeps something alive until it is gone.
#[derive(Debug)]
pub struct GuardedBody<T> {
    inner: Body,
    _held: T,
}

impl<T> GuardedBody<T> {
    pub(crate) const fn new(inner: Body, held: T) -> Self {
        Self { inner, _held: held }
    }
}

impl<T: Unpin> HttpBody for GuardedBody<T> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
