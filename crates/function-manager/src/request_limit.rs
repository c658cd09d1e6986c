//! Size limit for the body of a request before it reaches a function.
//!
//! The process has the same limit, but answers before it has read the complete body. The rest of
//! the body could then break the connection before the gateway reads the answer.

use crate::request_body::{BoxError, RequestBody};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

/// Body that fails after a maximum number of bytes.
struct LimitedRequest {
    inner: RequestBody,
    /// Number of bytes that the body may still have.
    remaining: u64,
    /// Set if the body was too large.
    exceeded: Arc<AtomicBool>,
}

/// Limits a body to `bytes`. The returned flag is set if the body exceeds the limit.
pub(crate) fn limited(body: RequestBody, bytes: u64) -> (RequestBody, Arc<AtomicBool>) {
    // The flag is set at once if the announced length exceeds the limit.
    let exceeded = Arc::new(AtomicBool::new(body.size_hint().lower() > bytes));
    let body = LimitedRequest {
        inner: body,
        remaining: bytes,
        exceeded: exceeded.clone(),
    };
    (body.boxed_unsync(), exceeded)
}

impl Body for LimitedRequest {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        let data = frame
            .as_ref()
            .and_then(|frame| frame.as_ref().ok()?.data_ref());
        let bytes = data.map_or(0, |data| u64::try_from(data.len()).unwrap_or(u64::MAX));
        match self.remaining.checked_sub(bytes) {
            Some(remaining) => {
                self.remaining = remaining;
                Poll::Ready(frame)
            }
            None => {
                // The flag is set before the error is returned: the caller reads it to identify the
                // cause.
                self.exceeded.store(true, Ordering::Release);
                Poll::Ready(Some(Err("the body is too long".into())))
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
