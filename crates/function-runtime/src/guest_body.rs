//! Response bodies that a guest (an instance of a function's module) writes while the host sends
//! them.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use crate::cpu_meter::RequestUsage;
use crate::fault::RequestFault;
use crate::head_timeout::{InFlightGuard, InFlightRequest};
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use tokio::task::JoinHandle;
use wasmtime_wasi_http::p2::body::HyperOutgoingBody;

/// Body of a response. An error resets the connection, so that the client notices an incomplete
/// body.
pub struct ResponseBody {
    content: Content,
    /// Request that counts as in flight until the body is dropped.
    _in_flight: Option<InFlightRequest>,
}

/// Content of a body.
enum Content {
    /// Bytes in memory. `None` after they were sent.
    Whole(Option<Bytes>),
    Guest(GuestBody),
}

impl ResponseBody {
    fn new(content: Content) -> Self {
        Self {
            content,
            _in_flight: None,
        }
    }

    /// Counts the request as in flight until the body has been sent. A body of known length is
    /// empty or in memory, and needs no extension: each write to the client restarts the head
    /// timeout.
    pub(crate) fn until_sent(self, request: &InFlightGuard<'_>) -> Self {
        match self.size_hint().exact() {
            Some(_) => self,
            None => Self {
                _in_flight: Some(request.extend()),
                ..self
            },
        }
    }
}

impl From<Bytes> for ResponseBody {
    fn from(bytes: Bytes) -> Self {
        Self::new(Content::Whole((!bytes.is_empty()).then_some(bytes)))
    }
}

impl From<GuestBody> for ResponseBody {
    fn from(body: GuestBody) -> Self {
        Self::new(Content::Guest(body))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match &mut self.content {
            Content::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Guest(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Whole(bytes) => bytes.is_none(),
            Content::Guest(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => {
                let length = bytes.as_ref().map_or(0, Bytes::len);
                SizeHint::with_exact(u64::try_from(length).unwrap_or(u64::MAX))
            }
            Content::Guest(body) => body.size_hint(),
        }
    }
}

/// Started guest. Dropping this value terminates a running guest.
pub(crate) enum GuestTask {
    Ended(Result<(), RequestFault>),
    Running(JoinHandle<Result<(), RequestFault>>),
}

impl GuestTask {
    /// Waits for the exit of a guest that returned no response, and returns its fault.
    pub(crate) async fn fault(mut self) -> RequestFault {
        let ended = match &mut self {
            Self::Ended(ended) => ended.clone(),
            Self::Running(task) => match task.await {
                Ok(ended) => ended,
                Err(error) => return RequestFault::Trap(format!("the guest's task: {error}")),
            },
        };
        match ended {
            Err(fault) => fault,
            Ok(()) => RequestFault::Trap("the guest returned no response".to_owned()),
        }
    }
}

impl Drop for GuestTask {
    fn drop(&mut self) {
        if let Self::Running(task) = self {
            // A client that disconnects terminates its guest.
            task.abort();
        }
    }
}

/// Body with a length limit. The guest is terminated when the body ends or the client disconnects.
pub(crate) struct GuestBody {
    body: HyperOutgoingBody,
    remaining_bytes: u64,
    usage: Arc<RequestUsage>,
    _task: GuestTask,
}

impl GuestBody {
    pub(crate) fn new(
        body: HyperOutgoingBody,
        max: u64,
        usage: Arc<RequestUsage>,
        task: GuestTask,
    ) -> Result<Self, RequestFault> {
        // Wasmtime announces no length for most guest bodies. `poll_frame` enforces the limit for
        // them.
        if body.size_hint().lower() > max {
            Err(RequestFault::ResponseTooLarge)
        } else {
            Ok(Self {
                body,
                remaining_bytes: max,
                usage,
                _task: task,
            })
        }
    }
}

impl Body for GuestBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let frame = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
            // The body ends because the guest's store was dropped, and is incomplete.
            None if self.usage.ended_early.load(Ordering::Acquire) => {
                let error = io::Error::other("the guest exited before the end of its response");
                return Poll::Ready(Some(Err(error)));
            }
            None => return Poll::Ready(None),
            Some(frame) => frame,
        };
        let frame = frame.map_err(|error| io::Error::other(format!("{error:?}")));
        if let Some(data) = frame.as_ref().ok().and_then(Frame::data_ref) {
            let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
            // The head was already sent: only a reset of the connection can report this.
            let Some(remaining_bytes) = self.remaining_bytes.checked_sub(length) else {
                return Poll::Ready(Some(Err(io::Error::other("the response is too large"))));
            };
            self.remaining_bytes = remaining_bytes;
        }
        Poll::Ready(Some(frame))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream() && !self.usage.ended_early.load(Ordering::Acquire)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
