//! Bodies of the agent's HTTP responses: complete, or in chunks from a source such as a process.

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::{Response, header};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Source of a body's chunks.
pub trait BodySource {
    /// Returns the next chunk, or `None` at the end. An error breaks the connection.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>>;

    /// Number of bytes that have not been returned yet, if known.
    fn remaining(&self) -> Option<u64> {
        None
    }
}

/// A response body.
pub enum ReplyBody {
    /// A body of at most one chunk. `None` if the body is empty or was already sent.
    Whole(Option<Bytes>),
    /// A body of several chunks.
    Stream(Box<dyn BodySource>),
}

impl ReplyBody {
    /// Returns a body without bytes.
    pub fn empty() -> Self {
        Self::Whole(None)
    }

    /// Returns a body with these bytes.
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        Self::Whole(Some(bytes.into()))
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Self::Stream(source) => source
                .poll_piece(cx)
                .map(|piece| piece.map(|result| result.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            // A stream ends only when its source returns no chunk.
            Self::Stream(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            Self::Stream(source) => source
                .remaining()
                .map_or_else(SizeHint::new, SizeHint::with_exact),
        }
    }
}

/// Returns a response with a JSON body and status 200.
pub fn json(value: &impl serde::Serialize) -> Response<ReplyBody> {
    json_body(ReplyBody::whole(
        serde_json::to_vec(value).unwrap_or_default(),
    ))
}

/// Returns the same response as [`json`] for a body that is already serialized.
pub fn json_body(body: ReplyBody) -> Response<ReplyBody> {
    let mut response = Response::new(body);
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    response
}
