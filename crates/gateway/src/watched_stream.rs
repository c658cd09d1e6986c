//! A client's byte stream that reports its activity and closes without losing an answer.

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

/// Time for which a client that is still sending is read from after its answer.
const LINGER_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that are read from such a client.
const MAX_LINGER_BYTES: usize = 64 << 20;

/// Stream that reports arriving bytes. It stays with the connection through an upgrade, and so does
/// the permit.
pub(crate) struct WatchedStream<T> {
    inner: T,
    /// Read before anything was made for the connection.
    first: FirstBytes,
    activity: Arc<ConnectionActivity>,
    lingering: Option<LingeringClose>,
}

/// Lingering close: a close with bytes unread would reset the connection and lose the answer.
struct LingeringClose {
    limit: Pin<Box<Sleep>>,
    left: usize,
}

impl LingeringClose {
    fn new() -> Self {
        Self {
            limit: Box::pin(sleep(LINGER_TIMEOUT)),
            left: MAX_LINGER_BYTES,
        }
    }

    /// Ready when the client has said all, or enough.
    fn poll<T: AsyncRead + Unpin>(&mut self, cx: &mut Context<'_>, stream: &mut T) -> Poll<()> {
        let mut space = [MaybeUninit::uninit(); 16 * 1024];
        while self.left > 0 && self.limit.as_mut().poll(cx).is_pending() {
            let mut buffer = ReadBuf::uninit(&mut space);
            match ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {
                    self.left = self.left.saturating_sub(buffer.filled().len());
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
        if self.first.copy_to(buf) {
            self.activity.bytes_arrived();
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        let result = Pin::new(&mut self.inner).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.activity.bytes_arrived();
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
            ready!(Pin::new(&mut this.inner).poll_shutdown(cx))?;
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
