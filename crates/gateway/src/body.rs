//! Bodies on their way: counted, never collected.

use crate::api_key;
use crate::counters::{Counters, add};
use crate::exchange::Underway;
use crate::pool::{Lease, Pool};
use bytes::{Buf, Bytes};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::timeout;

/// What is read of a request body that nobody wanted, and for how long, so that its connection can serve the next request.
const UNREAD: u64 = 64 * 1024;
const UNREAD_TIME: Duration = Duration::from_millis(250);

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

/// A client's request body. What nobody read of it is found in its [`Unread`].
#[derive(Debug)]
pub struct FromClient {
    /// None: it has been read to its end.
    inner: Option<Incoming>,
    unread: Unread,
}

/// Where a request body that was not read to its end is left.
#[derive(Debug, Clone, Default)]
pub(crate) struct Unread(Arc<Mutex<Option<Incoming>>>);

impl Unread {
    fn place(&self) -> std::sync::MutexGuard<'_, Option<Incoming>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what was left, if it is little and comes soon. Whether nothing is left.
    pub(crate) async fn read(&self) -> bool {
        let Some(mut body) = self.place().take() else {
            return true;
        };
        if body.size_hint().lower() > UNREAD {
            return false;
        }
        let reading = async move {
            let mut left = UNREAD;
            while let Some(frame) = body.frame().await {
                let length = frame.ok()?.data_ref().map_or(0, Bytes::len) as u64;
                left = left.checked_sub(length)?;
            }
            Some(())
        };
        matches!(timeout(UNREAD_TIME, reading).await, Ok(Some(())))
    }

    /// Whether something was left.
    pub(crate) fn is_some(&self) -> bool {
        self.place().is_some()
    }
}

impl FromClient {
    pub(crate) const fn new(inner: Incoming, unread: Unread) -> Self {
        Self {
            inner: Some(inner),
            unread,
        }
    }

    /// Nothing.
    fn empty() -> Self {
        Self {
            inner: None,
            unread: Unread::default(),
        }
    }
}

impl Drop for FromClient {
    fn drop(&mut self) {
        *self.unread.place() = self.inner.take().filter(|body| !body.is_end_stream());
    }
}

impl HttpBody for FromClient {
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
        if frame.is_none() {
            self.inner = None;
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

/// A client's request body on its way to the guest.
#[derive(Debug)]
pub struct ToGuest {
    inner: FromClient,
    counters: Arc<Counters>,
}

impl ToGuest {
    pub(crate) const fn new(inner: FromClient, counters: Arc<Counters>) -> Self {
        Self { inner, counters }
    }

    pub(crate) fn empty(counters: Arc<Counters>) -> Self {
        Self::new(FromClient::empty(), counters)
    }
}

impl HttpBody for ToGuest {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let mut frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &mut frame {
            count(&self.counters.bytes_to_guests, frame);
            if let Some(trailers) = frame.trailers_mut() {
                api_key::strip(trailers);
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
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

/// Body that breaks off when a future ends.
pub struct Until<F> {
    inner: Body,
    end: Pin<Box<F>>,
}

impl<F> Until<F> {
    pub(crate) const fn new(inner: Body, end: Pin<Box<F>>) -> Self {
        Self { inner, end }
    }
}

impl<F: Future<Output = ()>> HttpBody for Until<F> {
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
