//! Bodies of responses.

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::{Response, header};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Source of a body's chunks.
pub trait BodySource {
    /// The next chunk; `None` at the end. An error breaks the connection.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>>;

    /// Bytes still to come, if known.
    fn remaining(&self) -> Option<u64> {
        None
    }
}

/// A response body.
pub enum ReplyBody {
    /// The whole body at once.
    Whole(Option<Bytes>),
    /// One chunk after another.
    Stream(Box<dyn BodySource>),
}

impl ReplyBody {
    /// A body without bytes.
    pub fn empty() -> Self {
        Self::Whole(None)
    }

    /// A body of these bytes.
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

/// Response with a JSON body and status 200.
pub fn json(value: &impl serde::Serialize) -> Response<ReplyBody> {
    json_body(ReplyBody::whole(
        serde_json::to_vec(value).unwrap_or_default(),
    ))
}

/// [`json`] for a body that is JSON already.
pub fn json_body(body: ReplyBody) -> Response<ReplyBody> {
    let mut response = Response::new(body);
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    response
}
