//! [`Stream`]: a stream of bytes between two members, for example a client's WebSocket that one
//! member forwards to the host of the sandbox. Its two directions are the bodies of one HTTP/2
//! request and of its response.

use super::body::{Body, BoxError, Interrupted};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming};
use hyper::{Request, Response};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio_util::sync::PollSender;

/// Maximum number of chunks between the writer and the connection.
const QUEUED_CHUNKS: usize = 4;
/// Maximum size of a chunk.
const CHUNK_BYTES: usize = 32 << 10;

/// Stream of bytes to another member. Each direction ends on its own: `shutdown` ends the writes.
/// If the stream is dropped before `shutdown`, the peer reads an error instead of the end.
pub struct Stream {
    /// Body that contains the bytes of the peer.
    incoming: Body,
    /// Rest of the last received chunk, which the reader has not taken yet.
    chunk: Bytes,
    outgoing: PollSender<Bytes>,
    /// Set by `shutdown`: the queue then ends without an error.
    is_complete: Arc<AtomicBool>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").finish_non_exhaustive()
    }
}

/// Returns the stream of a request of [`Client::open_stream`](super::Client::open_stream), and the
/// body of the response that accepts it.
pub fn accept_stream(request: Request<Incoming>) -> (Stream, Response<Body>) {
    let (sender, body) = outgoing();
    let stream = sender.with(request.into_body().map_err(Interrupted::new).boxed_unsync());
    (stream, Response::new(body))
}

/// Writing side of a stream without its reading side.
pub(super) struct Sender {
    outgoing: PollSender<Bytes>,
    is_complete: Arc<AtomicBool>,
}

impl Sender {
    /// Returns the stream that reads from `incoming`.
    pub(super) fn with(self, incoming: Body) -> Stream {
        Stream {
            incoming,
            chunk: Bytes::new(),
            outgoing: self.outgoing,
            is_complete: self.is_complete,
        }
    }
}

/// Returns the writing side of a stream, and the body that contains the written bytes.
pub(super) fn outgoing() -> (Sender, Body) {
    let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
    let is_complete = Arc::new(AtomicBool::new(false));
    let body = Written {
        receiver,
        is_complete: is_complete.clone(),
    };
    let sender = Sender {
        outgoing: PollSender::new(sender),
        is_complete,
    };
    (sender, body.boxed_unsync())
}

/// Body of written bytes.
struct Written {
    receiver: mpsc::Receiver<Bytes>,
    is_complete: Arc<AtomicBool>,
}

impl HttpBody for Written {
    type Data = Bytes;
    type Error = Interrupted;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Interrupted>>> {
        match ready!(self.receiver.poll_recv(cx)) {
            Some(chunk) => Poll::Ready(Some(Ok(Frame::data(chunk)))),
            None if self.is_complete.load(Ordering::Acquire) => Poll::Ready(None),
            None => Poll::Ready(Some(Err(Interrupted::new("the stream was dropped")))),
        }
    }
}

fn reset(reason: impl Into<BoxError>) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, reason)
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.chunk.is_empty() {
            match ready!(Pin::new(&mut self.incoming).poll_frame(cx)) {
                None => return Poll::Ready(Ok(())),
                Some(Err(error)) => return Poll::Ready(Err(reset(error))),
                Some(Ok(frame)) => self.chunk = frame.into_data().unwrap_or_default(),
            }
        }
        let length = self.chunk.len().min(buffer.remaining());
        buffer.put_slice(&self.chunk.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let closed = |_| reset("the connection to the member was lost");
        ready!(self.outgoing.poll_reserve(cx)).map_err(closed)?;
        let length = bytes.len().min(CHUNK_BYTES);
        let chunk = Bytes::copy_from_slice(&bytes[..length]);
        self.outgoing.send_item(chunk).map_err(closed)?;
        Poll::Ready(Ok(length))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_complete.store(true, Ordering::Release);
        self.outgoing.close();
        Poll::Ready(Ok(()))
    }
}
