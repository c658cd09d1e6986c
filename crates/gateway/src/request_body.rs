//! Bodies of requests, in transit from the client to the guest.
//!
//! The guest may answer before it has read the whole body. The remainder is read for a short time,
//! so that the client's connection can serve another request.

use crate::body::count;
use crate::counters::GatewayCounters;
use crate::guest_calls::CopiedBody;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use parking_lot::{Mutex, MutexGuard};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::timeout;

/// Maximum size of the unwanted remainder of an HTTP/1 request body that is read, so that the
/// connection can serve the next request. The connection is closed after the response if the
/// remainder is larger.
const MAX_UNREAD_BYTES: u64 = 64 * 1024;
/// Maximum time for reading the remainder.
const UNREAD_TIMEOUT: Duration = Duration::from_millis(250);

/// Body of a client's request. If it is dropped before its end, the remainder moves to its
/// [`UnreadBody`].
#[derive(Debug)]
pub struct ClientRequestBody {
    /// `None` if the body is empty or was read to its end.
    inner: Option<Incoming>,
    unread: UnreadBody,
    /// Receives a copy of the first bytes.
    copied: Option<CopiedBody>,
}

/// Remainder of a request body that was dropped before its end.
#[derive(Debug, Clone, Default)]
pub(crate) struct UnreadBody(Arc<Mutex<Option<Incoming>>>);

impl UnreadBody {
    fn lock(&self) -> MutexGuard<'_, Option<Incoming>> {
        self.0.lock()
    }

    /// Reads the remainder if it is short and arrives soon. Returns true if nothing remains.
    pub(crate) async fn read(&self) -> bool {
        // The lock is released before the body is read.
        let Some(mut body) = self.lock().take() else {
            return true;
        };
        // The announced length is enough to decide.
        if body.size_hint().lower() > MAX_UNREAD_BYTES {
            return false;
        }
        let reading = async move {
            let mut remaining = MAX_UNREAD_BYTES;
            while let Some(frame) = body.frame().await {
                let length = frame.ok()?.data_ref().map_or(0, Bytes::len) as u64;
                // An underflow means that the body is too long.
                remaining = remaining.checked_sub(length)?;
            }
            Some(())
        };
        matches!(timeout(UNREAD_TIMEOUT, reading).await, Ok(Some(())))
    }

    /// Returns true if a remainder exists.
    pub(crate) fn is_some(&self) -> bool {
        self.lock().is_some()
    }
}

impl ClientRequestBody {
    pub(crate) const fn new(inner: Incoming, unread: UnreadBody) -> Self {
        Self {
            inner: Some(inner),
            unread,
            copied: None,
        }
    }

    /// Returns an empty body.
    pub(crate) fn empty() -> Self {
        Self {
            inner: None,
            unread: UnreadBody::default(),
            copied: None,
        }
    }

    /// Copies the first bytes of the body while it is read.
    pub(crate) fn copy_to(&mut self, copied: CopiedBody) {
        self.copied = Some(copied);
    }
}

impl Drop for ClientRequestBody {
    fn drop(&mut self) {
        // The body of a completed request leaves nothing to read.
        *self.unread.lock() = self.inner.take().filter(|body| !body.is_end_stream());
    }
}

impl HttpBody for ClientRequestBody {
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
        if let (Some(copied), Some(Ok(frame))) = (&self.copied, &frame)
            && let Some(bytes) = frame.data_ref()
        {
            copied.add(bytes);
        }
        // The body is complete: dropping it later must leave no remainder.
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

/// Body of a client's request in transit to the guest.
#[derive(Debug)]
pub struct GuestRequestBody {
    inner: ClientRequestBody,
    counters: Arc<GatewayCounters>,
}

impl GuestRequestBody {
    pub(crate) const fn new(inner: ClientRequestBody, counters: Arc<GatewayCounters>) -> Self {
        Self { inner, counters }
    }

    pub(crate) fn empty(counters: Arc<GatewayCounters>) -> Self {
        Self::new(ClientRequestBody::empty(), counters)
    }
}

impl HttpBody for GuestRequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let mut frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &mut frame {
            count(&self.counters.bytes_to_guests, frame);
            // Trailers may contain an API key, which the guest must not receive.
            if let Some(trailers) = frame.trailers_mut() {
                jiffy_http::headers::api_key::strip(trailers);
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
