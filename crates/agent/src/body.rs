//! Bodies of responses.

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Something that produces a body piece by piece.
pub trait Source {
    /// The next piece; `None` at the end. An error breaks the connection.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>>;

    /// Bytes still to come, if known.
    fn remaining(&self) -> Option<u64> {
        None
    }
}

/// A response body.
pub enum Reply {
    /// All of it at once.
    Whole(Option<Bytes>),
    /// Piece by piece.
    Stream(Box<dyn Source>),
}

impl Reply {
    /// No bytes.
    pub fn empty() -> Self {
        Self::Whole(None)
    }

    /// These bytes.
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        Self::Whole(Some(bytes.into()))
    }
}

impl Body for Reply {
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

/// The content of a file for a reader that wants a stream.
pub fn blocking_stream(
    mut file: std::fs::File,
) -> http_body_util::BodyDataStream<impl Body<Data = Bytes, Error = io::Error>> {
    struct Contents<F>(F);
    impl<F: FnMut() -> io::Result<Option<Bytes>> + Unpin> Body for Contents<F> {
        type Data = Bytes;
        type Error = io::Error;
        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
            let next = (self.get_mut().0)();
            Poll::Ready(next.map(|b| b.map(Frame::data)).transpose())
        }
    }
    http_body_util::BodyDataStream::new(Contents(move || {
        let mut chunk = vec![0; 64 * 1024];
        let n = io::Read::read(&mut file, &mut chunk)?;
        chunk.truncate(n);
        Ok((n > 0).then(|| chunk.into()))
    }))
}
