//! Bound on the body of a request on its way to a function.
//!
//! The process has the same bound, but answers before it has read such a body, upon which the rest
//! of it could break the connection before the answer is read.

use crate::request_body::{BoxError, RequestBody};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

/// Body that fails beyond a number of bytes.
struct LimitedRequest {
    inner: RequestBody,
    left: u64,
    exceeded: Arc<AtomicBool>,
}

/// Bounds a body to `bytes`. The flag tells that it was longer.
pub(crate) fn limited(body: RequestBody, bytes: u64) -> (RequestBody, Arc<AtomicBool>) {
    let exceeded = Arc::new(AtomicBool::new(body.size_hint().lower() > bytes));
    let body = LimitedRequest {
        inner: body,
        left: bytes,
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
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                Poll::Ready(frame)
            }
            None => {
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
