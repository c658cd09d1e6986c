//! Connections on which the head of a request arrives in time, and the next one within as much
//! after a response.
//!
//! A timer per connection is looked at, not set anew for each request: that would cost a system
//! call, as the runtime would have to be woken for an earlier deadline.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// Number of a connection's requests whose head was read and whose response is not complete.
#[derive(Debug, Clone, Default)]
pub(crate) struct UnderWay(Arc<AtomicUsize>);

/// Request that is under way.
pub(crate) struct RequestUnderWay(UnderWay);

/// The same, as long as its connection is served.
pub(crate) struct Answering<'a>(&'a UnderWay);

impl UnderWay {
    /// Counts a request until the value is dropped.
    pub(crate) fn enter(&self) -> Answering<'_> {
        self.0.fetch_add(1, Ordering::AcqRel);
        Answering(self)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Drop for RequestUnderWay {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Answering<'_> {
    /// Counts the request until the returned value is dropped.
    pub(crate) fn extend(&self) -> RequestUnderWay {
        self.0.0.fetch_add(1, Ordering::AcqRel);
        RequestUnderWay(self.0.clone())
    }
}

/// Connection with a limit of the time for a head.
pub(crate) struct HeadTimeout<S> {
    stream: S,
    limit: Duration,
    under_way: UnderWay,
    /// Connection, or last write of a response.
    since: Instant,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> HeadTimeout<S> {
    pub(crate) fn new(stream: S, limit: Duration, under_way: UnderWay) -> Self {
        Self {
            stream,
            limit,
            under_way,
            since: Instant::now(),
            timer: None,
        }
    }

    /// Waits for the deadline, while a head is waited for.
    fn poll_deadline(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.under_way.is_idle() {
            return Poll::Pending;
        }
        let deadline = self.since + self.limit;
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        loop {
            ready!(timer.as_mut().poll(context));
            if Instant::now() >= deadline {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            // It was set before the last response.
            timer.as_mut().reset(deadline);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HeadTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            Poll::Pending => self.poll_deadline(context),
            read => read,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HeadTimeout<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.since = Instant::now();
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.since = Instant::now();
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    const LIMIT: Duration = Duration::from_millis(200);

    #[tokio::test]
    async fn a_head_that_trickles_is_cut_off_and_a_request_under_way_is_not() {
        let (mut client, server) = duplex(64);
        let under_way = UnderWay::default();
        let mut server = HeadTimeout::new(server, LIMIT, under_way.clone());
        let mut buffer = [0; 1];
        let start = Instant::now();
        let sender = tokio::spawn(async move {
            while client.write_all(b"x").await.is_ok() {
                tokio::time::sleep(LIMIT / 8).await;
            }
        });
        let cut = loop {
            if let Err(e) = server.read_exact(&mut buffer).await {
                break e;
            }
        };
        assert_eq!(cut.kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() >= LIMIT);
        drop(server);
        sender.await.unwrap();

        let (mut client, server) = duplex(64);
        let mut server = HeadTimeout::new(server, LIMIT, under_way.clone());
        let request = under_way.enter();
        let waited = tokio::time::timeout(LIMIT * 2, server.read_exact(&mut buffer)).await;
        assert!(waited.is_err(), "a body has limits of its own");
        drop(request);
        // A response puts off the deadline.
        server.write_all(b"y").await.unwrap();
        client.write_all(b"z").await.unwrap();
        server.read_exact(&mut buffer).await.unwrap();
        let cut = server.read_exact(&mut buffer).await.unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::TimedOut);
    }
}
