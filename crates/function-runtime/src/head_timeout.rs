//! Connections with a timeout for the head of a request. The timeout starts when the connection
//! starts, and again after each response.
//!
//! The *head* of a request or response is its first line and its headers, without the body.
//!
//! Each connection has one timer. The timer is not reset for each request: an earlier deadline
//! would have to wake the runtime, which costs a system call.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// Number of requests of a connection whose head was read and whose response is incomplete.
#[derive(Debug, Clone, Default)]
pub(crate) struct InFlightRequests(Arc<AtomicUsize>);

/// Request in flight, independent of the connection's lifetime.
pub(crate) struct InFlightRequest(InFlightRequests);

/// Request in flight, borrowed from the connection that serves it.
pub(crate) struct InFlightGuard<'a>(&'a InFlightRequests);

impl InFlightRequests {
    /// Counts a request until the value is dropped.
    pub(crate) fn enter(&self) -> InFlightGuard<'_> {
        self.0.fetch_add(1, Ordering::AcqRel);
        InFlightGuard(self)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl InFlightGuard<'_> {
    /// Counts the request until the returned value is dropped.
    pub(crate) fn extend(&self) -> InFlightRequest {
        self.0.0.fetch_add(1, Ordering::AcqRel);
        InFlightRequest(self.0.clone())
    }
}

/// Connection with a timeout for the head of a request.
pub(crate) struct HeadTimeout<S> {
    stream: S,
    limit: Duration,
    in_flight: InFlightRequests,
    /// Time of the connection's start or of the last write of a response.
    since: Instant,
    /// Timer of the timeout. Created when the connection waits for a head for the first time.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> HeadTimeout<S> {
    pub(crate) fn new(stream: S, limit: Duration, in_flight: InFlightRequests) -> Self {
        Self {
            stream,
            limit,
            in_flight,
            since: Instant::now(),
            timer: None,
        }
    }

    /// Polls the deadline if the connection waits for a head.
    fn poll_deadline(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Another timeout limits the body and the response of a request in flight.
        if !self.in_flight.is_idle() {
            return Poll::Pending;
        }
        // The deadline counts from the last response, and not from the timer, which may be older.
        let deadline = self.since + self.limit;
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        loop {
            ready!(timer.as_mut().poll(context));
            if Instant::now() >= deadline {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            // The timer was set before the last response.
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
        // Bytes that have arrived are read even after the deadline.
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

    /// Timeout of a request's head in these tests.
    const LIMIT: Duration = Duration::from_millis(200);

    #[tokio::test]
    async fn the_timeout_applies_to_a_slow_head_but_not_to_a_request_in_flight() {
        let (mut client, server) = duplex(64);
        let in_flight = InFlightRequests::default();
        let mut server = HeadTimeout::new(server, LIMIT, in_flight.clone());
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
        let mut server = HeadTimeout::new(server, LIMIT, in_flight.clone());
        let request = in_flight.enter();
        let waited = tokio::time::timeout(LIMIT * 2, server.read_exact(&mut buffer)).await;
        assert!(waited.is_err(), "the head timeout does not apply to bodies");
        drop(request);
        // A response postpones the deadline.
        server.write_all(b"y").await.unwrap();
        client.write_all(b"z").await.unwrap();
        server.read_exact(&mut buffer).await.unwrap();
        let cut = server.read_exact(&mut buffer).await.unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::TimedOut);
    }
}
