//! [`CountedStream`]: a TCP stream of a guest through the proxy for connections that rules permit
//! by name (`proxy.rs`). It counts bytes for the connection record.

use crate::connections::CarriedBytes;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Guest's end of a proxied connection. Bytes read from it are outgoing, bytes written to it are
/// incoming.
pub(crate) struct CountedStream {
    stream: TcpStream,
    bytes: Arc<CarriedBytes>,
}

impl CountedStream {
    /// Creates a stream that adds its bytes to the counters `bytes`.
    pub fn new(stream: TcpStream, bytes: Arc<CarriedBytes>) -> Self {
        Self { stream, bytes }
    }
}

/// Adds a number of bytes to a counter.
fn add(counter: &AtomicU64, bytes: usize) {
    // Relaxed: an independent statistic. The cast is lossless on 64-bit hosts.
    counter.fetch_add(bytes as u64, Ordering::Relaxed);
}

impl AsyncRead for CountedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        add(&self.bytes.out, buffer.filled().len() - before);
        read
    }
}

impl AsyncWrite for CountedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, data);
        if let Poll::Ready(Ok(length)) = &written {
            add(&self.bytes.back, *length);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
