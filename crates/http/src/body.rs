//! Bodies of requests and responses: a common error type, and a body with a guard.

use hyper::body::{Body, Frame, SizeHint};
use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Error of any body.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Body with a guard, for example a permit, that is dropped together with the body.
#[derive(Debug)]
pub struct GuardedBody<B, T> {
    inner: B,
    _held: T,
}

impl<B, T> GuardedBody<B, T> {
    /// Creates a body with the content of `inner`.
    pub const fn new(inner: B, held: T) -> Self {
        Self { inner, _held: held }
    }
}

impl<B: Body + Unpin, T: Unpin> Body for GuardedBody<B, T> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
