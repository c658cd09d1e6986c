//! Bodies of requests to an agent, either whole or streamed.

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// Body of a request to the agent.
#[derive(Debug)]
pub enum RequestBody {
    /// Body of one chunk, or without content.
    Whole(Option<Bytes>),
    /// Chunks from a channel. The sender waits while the agent reads more slowly.
    Channel(mpsc::Receiver<Bytes>),
}

impl RequestBody {
    /// Creates a body with these bytes.
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        Self::Whole(Some(bytes.into()))
    }

    /// Creates a body and its sender. The sender waits while two chunks are queued.
    pub fn channel() -> (mpsc::Sender<Bytes>, Self) {
        // A short queue bounds the memory and makes the sender wait for the agent.
        let (sender, receiver) = mpsc::channel(2);
        (sender, Self::Channel(receiver))
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Self::Channel(pieces) => pieces
                .poll_recv(cx)
                // The body ends when the sender is dropped.
                .map(|piece| piece.map(|b| Ok(Frame::data(b)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            Self::Channel(_) => SizeHint::new(),
        }
    }
}
