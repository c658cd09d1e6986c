//! Bodies of responses, in transit from the guest to the client.
//!
//! An *exchange* is a request to a sandbox or function with its response or stream.
//!
//! The gateway counts the bytes, and records the end of the exchange when the body is complete or
//! dropped.

use crate::body::{Body, BoxError, count};
use crate::counters::GatewayCounters;
use crate::in_flight_exchange::InFlightExchange;
use crate::pool::GuestResponseBody;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// Body of a guest's response in transit to the client.
#[derive(Debug)]
pub struct ClientResponseBody {
    inner: GuestResponseBody,
    counters: Arc<GatewayCounters>,
    /// Error of the guest, reported after the preceding bytes were flushed.
    interrupted: Option<hyper::Error>,
    _in_flight: InFlightExchange,
}

impl ClientResponseBody {
    pub(crate) fn new(
        inner: GuestResponseBody,
        counters: Arc<GatewayCounters>,
        in_flight: InFlightExchange,
    ) -> Self {
        Self {
            inner,
            counters,
            interrupted: None,
            _in_flight: in_flight,
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
        if let Some(e) = self.interrupted.take() {
            return Poll::Ready(Some(Err(e.into())));
        }
        match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
            Some(Ok(frame)) => {
                count(&self.counters.bytes_to_clients, &frame);
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(e)) => {
                // hyper sends buffered bytes when a body is pending, but discards them after an
                // error. Therefore this body is pending once before it reports the error.
                self.interrupted = Some(e);
                // Without a wake-up, the server would not poll the body again.
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Body that fails when a future completes. The response to a signed link is interrupted when the
/// link is revoked, and a response of another host when the host is lost.
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
        // `end` is polled first: the poll registers the waker, so that `end` interrupts the
        // response even while the guest sends nothing.
        if self.end.as_mut().poll(cx).is_ready() {
            let reason = "the link is no longer valid, or the host was lost";
            return Poll::Ready(Some(Err(reason.into())));
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
