//! Body of a function's response. The process counts as in use until the body is dropped.

use crate::process_connections::ConnectionBody;
use crate::running_process::ProcessUse;
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};

/// Body of a function's response.
#[derive(Debug)]
pub struct FunctionBody {
    inner: ConnectionBody,
    _in_use: ProcessUse,
}

impl FunctionBody {
    pub(crate) fn new(inner: ConnectionBody, in_use: ProcessUse) -> Self {
        Self {
            inner,
            _in_use: in_use,
        }
    }
}

// `jiffy_http::GuardedBody<ConnectionBody, ProcessUse>` would have the same effect. However, the
// compiler then cannot prove that futures with a response are `Send`.
impl Body for FunctionBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
