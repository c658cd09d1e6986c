//! Bodies on their way: counted, never collected.

use crate::counters::{Counters, add};
use crate::exchange::Underway;
use crate::pool::{Lease, Pool};
use bytes::{Buf, Bytes};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// Any error.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// Body of an answer to a client.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// A body that is there already.
pub fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// A client's request body on its way to the guest.
#[derive(Debug)]
pub struct ToGuest {
    inner: Option<Incoming>,
    counters: Arc<Counters>,
}

impl ToGuest {
    pub(crate) fn new(inner: Incoming, counters: Arc<Counters>) -> Self {
        Self {
            inner: Some(inner),
            counters,
        }
    }

    pub(crate) fn empty(counters: Arc<Counters>) -> Self {
        Self {
            inner: None,
            counters,
        }
    }
}

impl HttpBody for ToGuest {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(inner) = &mut self.inner else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(inner).poll_frame(cx));
        if let Some(Ok(frame)) = &frame {
            count(&self.counters.bytes_to_guests, frame);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner
            .as_ref()
            .map_or(SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

fn count(counter: &std::sync::atomic::AtomicU64, frame: &Frame<Bytes>) {
    if let Some(data) = frame.data_ref() {
        add(counter, data.remaining() as u64);
    }
}

/// A guest's answer body on its way to the client. Dropped before its end (the client is gone) it takes the connection to the guest with it;
/// at its end the connection goes back to the pool.
#[derive(Debug)]
pub struct ToClient {
    inner: Incoming,
    counters: Arc<Counters>,
    pool: Arc<Pool>,
    lease: Option<Lease>,
    _underway: Underway,
}

impl ToClient {
    pub(crate) fn new(
        inner: Incoming,
        counters: Arc<Counters>,
        pool: Arc<Pool>,
        lease: Lease,
        underway: Underway,
    ) -> Self {
        let mut body = Self {
            inner,
            counters,
            pool,
            lease: Some(lease),
            _underway: underway,
        };
        if body.inner.is_end_stream() {
            body.finish();
        }
        body
    }

    fn finish(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.pool.give_back(lease);
        }
    }
}

impl HttpBody for ToClient {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
            Some(Ok(frame)) => {
                count(&self.counters.bytes_to_clients, &frame);
                // Nobody asks again after trailers, or once the announced length is there.
                if frame.is_trailers() || self.inner.is_end_stream() {
                    self.finish();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(e)) => {
                self.lease = None;
                Poll::Ready(Some(Err(e.into())))
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

/// Any body that keeps something alive until it is gone.
#[derive(Debug)]
pub struct Holding<T> {
    inner: Body,
    _held: T,
}

impl<T> Holding<T> {
    pub(crate) const fn new(inner: Body, held: T) -> Self {
        Self { inner, _held: held }
    }
}

impl<T: Unpin> HttpBody for Holding<T> {
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
