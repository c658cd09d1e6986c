//! [`ReadAhead`]: a stream whose first bytes were read already, to find the host name of a
//! connection. They are returned again before the following bytes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Stream that returns `head` before the bytes of `stream`.
pub(crate) struct ReadAhead<S> {
    head: Vec<u8>,
    /// Number of returned bytes of `head`.
    position: usize,
    stream: S,
}

impl<S> ReadAhead<S> {
    /// Creates a stream that returns `head`, the bytes that were read, before the rest of `stream`.
    pub fn new(head: Vec<u8>, stream: S) -> Self {
        Self {
            head,
            position: 0,
            stream,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadAhead<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let rest = self.head.get(self.position..).unwrap_or_default();
        if rest.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, buffer);
        }
        let length = rest.len().min(buffer.remaining());
        buffer.put_slice(rest.get(..length).unwrap_or_default());
        self.position += length;
        if self.position == self.head.len() {
            // The bytes are not needed during the rest of the connection.
            self.head = Vec::new();
            self.position = 0;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadAhead<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
