//! Body of a function's response, which keeps what the request occupies until its end.

use crate::process_connections::ConnectionBody;
use crate::running_process::ProcessUse;
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use std::any::Any;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Body of a function's response.
#[derive(Debug)]
pub struct FunctionBody {
    inner: ConnectionBody,
    _in_use: ProcessUse,
    permit: Option<Box<dyn Any + Send>>,
}

impl FunctionBody {
    pub(crate) fn new(inner: ConnectionBody, in_use: ProcessUse) -> Self {
        Self {
            inner,
            _in_use: in_use,
            permit: None,
        }
    }

    /// The same with a permit that is held until the end of the body.
    #[must_use]
    pub fn with_permit(mut self, permit: impl Any + Send) -> Self {
        self.permit = Some(Box::new(permit));
        self
    }
}

impl Body for FunctionBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
