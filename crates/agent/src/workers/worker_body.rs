//! Response bodies whose chunks are produced by worker threads, with one call per chunk.

use super::{CallClass, CallError, Progress, Workers};
use crate::body::BodySource;
use bytes::Bytes;
use http_body_util::BodyDataStream;
use hyper::body::{Body, Frame};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// Source of chunks that may wait for a file system.
pub trait ChunkSource: Send + Unpin + 'static {
    /// Returns the next chunk, or `None` at the end.
    fn next_chunk(&mut self, progress: &Progress) -> io::Result<Option<Bytes>>;
}

/// Result of a call: the source, and its next chunk.
type Outcome<S> = (S, io::Result<Option<Bytes>>);
/// Call of a worker that is in progress.
type PendingCall<S> = Pin<Box<dyn Future<Output = Result<Outcome<S>, CallError>> + Send>>;

/// A body that consists of a first chunk and the chunks of a [`ChunkSource`].
pub struct WorkerBody<S> {
    workers: Workers,
    /// Operation and its object, for errors.
    what: String,
    /// First chunk, until it is sent.
    first: Option<Bytes>,
    /// Source of the chunks. `None` while a call uses the source, and after the last chunk.
    source: Option<S>,
    /// Call that produces the next chunk.
    call: Option<PendingCall<S>>,
    /// Number of bytes that are still to be sent, if known.
    remaining: Option<u64>,
}

impl<S: ChunkSource> WorkerBody<S> {
    /// Creates a body that begins with `first`. `remaining` is the length of the whole body, if
    /// known.
    pub fn new(
        workers: &Workers,
        what: String,
        first: Option<Bytes>,
        source: S,
        remaining: Option<u64>,
    ) -> Self {
        Self {
            workers: workers.clone(),
            what,
            first,
            source: Some(source),
            call: None,
            remaining,
        }
    }

    /// Returns the chunks as a stream.
    pub fn into_stream(self) -> BodyDataStream<impl Body<Data = Bytes, Error = io::Error> + Send> {
        BodyDataStream::new(StreamAdapter(self))
    }

    /// Creates the call that returns the next chunk. Does nothing while a call is in progress, and
    /// after the end or an error.
    fn request(&mut self) {
        if let Some(mut source) = self.source.take() {
            let workers = self.workers.clone();
            let what = self.what.clone();
            self.call = Some(Box::pin(async move {
                let work = move |progress: &Progress| {
                    let chunk = source.next_chunk(progress);
                    (source, chunk)
                };
                workers.run(CallClass::Files, what, work).await
            }));
        }
    }

    /// Passes a chunk to the client, limited to the announced length of the body.
    fn deliver(&mut self, mut chunk: Bytes) -> Poll<Option<io::Result<Bytes>>> {
        if let Some(remaining) = &mut self.remaining {
            // The source may have grown since its length was announced.
            chunk.truncate(usize::try_from(*remaining).unwrap_or(usize::MAX));
            // The subtraction cannot underflow: after `truncate`, the chunk has at most `remaining`
            // bytes.
            *remaining -= chunk.len() as u64;
        }
        Poll::Ready(Some(Ok(chunk)))
    }
}

impl<S: ChunkSource> BodySource for WorkerBody<S> {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if let Some(first) = self.first.take() {
            return self.deliver(first);
        }
        if self.remaining == Some(0) {
            return Poll::Ready(None);
        }
        // One call at a time uses the source: `request` moves it into the call, which returns it.
        self.request();
        let Some(call) = &mut self.call else {
            return Poll::Ready(None);
        };
        let outcome = ready!(call.as_mut().poll(cx));
        self.call = None;
        match outcome {
            Ok((source, Ok(Some(chunk)))) => {
                self.source = Some(source);
                self.deliver(chunk)
            }
            Ok((_, Ok(None))) => match self.remaining {
                // The source is shorter than announced. The connection must break, because the
                // client would otherwise wait for the missing bytes.
                Some(_) => Poll::Ready(Some(Err(io::ErrorKind::UnexpectedEof.into()))),
                None => Poll::Ready(None),
            },
            Ok((_, Err(e))) => Poll::Ready(Some(Err(e))),
            Err(e) => Poll::Ready(Some(Err(e.into()))),
        }
    }

    fn remaining(&self) -> Option<u64> {
        self.remaining
    }
}

/// Body of a request as a stream of bytes.
struct StreamAdapter<S>(WorkerBody<S>);

impl<S: ChunkSource> Body for StreamAdapter<S> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let piece = ready!(self.get_mut().0.poll_piece(cx));
        Poll::Ready(piece.map(|result| result.map(Frame::data)))
    }
}
