//! Byte stream of a client, below HTTP. It reports received bytes for the idle timeouts. It closes
//! without losing the last response.

use crate::activity::ConnectionActivity;
use crate::first_bytes::FirstBytes;
use std::future::Future;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Maximum time for reading from a client that is still sending after its response.
const LINGER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of bytes read from such a client.
const MAX_LINGER_BYTES: usize = 64 << 20;

/// Stream that reports received bytes. An upgraded connection retains this stream and thereby the
/// connection's permit, which `activity` contains.
pub(crate) struct WatchedStream<T> {
    inner: T,
    /// Bytes read before the connection's buffers were allocated.
    first: FirstBytes,
    activity: Arc<ConnectionActivity>,
    /// `None` until the stream is being closed.
    lingering: Option<LingeringClose>,
}

/// State of a lingering close: the stream discards received bytes before closing. Closing with
/// unread bytes would reset the connection and lose the response.
struct LingeringClose {
    limit: Pin<Box<Sleep>>,
    /// Number of bytes that may still be discarded.
    remaining: usize,
}

impl LingeringClose {
    fn new() -> Self {
        Self {
            limit: Box::pin(sleep(LINGER_TIMEOUT)),
            remaining: MAX_LINGER_BYTES,
        }
    }

    /// Completes when the client has finished sending or a limit is reached.
    fn poll<T: AsyncRead + Unpin>(&mut self, cx: &mut Context<'_>, stream: &mut T) -> Poll<()> {
        // The contents are discarded, so the buffer is on the stack and uninitialized.
        let mut space = [MaybeUninit::uninit(); 16 * 1024];
        while self.remaining > 0 && self.limit.as_mut().poll(cx).is_pending() {
            let mut buffer = ReadBuf::uninit(&mut space);
            match ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {
                    self.remaining = self.remaining.saturating_sub(buffer.filled().len());
                }
                _ => break,
            }
        }
        Poll::Ready(())
    }
}

impl<T> WatchedStream<T> {
    pub(crate) const fn new(
        inner: T,
        first: FirstBytes,
        activity: Arc<ConnectionActivity>,
    ) -> Self {
        Self {
            inner,
            first,
            activity,
            lingering: None,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WatchedStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // hyper first receives the bytes that were read before it was started.
        if self.first.copy_to(buf) {
            self.activity.bytes_arrived();
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        let result = Pin::new(&mut self.inner).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.activity.bytes_arrived();
        // Otherwise, a read of 0 bytes into a buffer with free space is an end of file: the client
        // has closed its sending side. The end of file may have to be ignored until the response is
        // sent.
        } else if matches!(result, Poll::Ready(Ok(())))
            && buf.remaining() > 0
            && self.activity.waits_after_eof(cx.waker())
        {
            return Poll::Pending;
        }
        result
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for WatchedStream<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.lingering.is_none() {
            // First send the end of file, so that the client sees the end of the response.
            ready!(Pin::new(&mut this.inner).poll_shutdown(cx))?;
            // No unread bytes can remain, so closing does not reset the connection.
            if !this.activity.may_send_more() {
                return Poll::Ready(Ok(()));
            }
        }
        let lingering = this.lingering.get_or_insert_with(LingeringClose::new);
        lingering.poll(cx, &mut this.inner).map(Ok)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}
