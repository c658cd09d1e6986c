//! [`SandboxStream`]: a stream into a guest whose traffic counts as use of the sandbox.

use crate::sandboxes::SandboxUse;
use jiffy_engine_api::GuestStream;
use jiffy_proto::agent::{ENVD_PORT, MAX_KEEPALIVE_BYTES};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

/// Stream into a guest. Its traffic counts as use of the sandbox.
#[derive(Debug)]
pub struct SandboxStream {
    inner: GuestStream,
    /// Recorder of uses. `None` if the traffic does not count.
    uses: Option<SandboxUse>,
    /// Maximum size of a read that does not count, in bytes.
    max_uncounted: usize,
}

impl SandboxStream {
    /// Counts the traffic of a stream to `port` in `uses`. Keepalives of the agent do not count:
    /// the agent sends them on every open stream.
    #[must_use]
    pub fn new(inner: GuestStream, uses: Option<SandboxUse>, port: u16) -> Self {
        let is_agent = u32::from(port) == ENVD_PORT;
        Self {
            inner,
            uses,
            max_uncounted: if is_agent { MAX_KEEPALIVE_BYTES } else { 0 },
        }
    }

    fn record(&self) {
        if let Some(uses) = &self.uses {
            uses.record();
        }
    }

    /// Records the result of a write.
    fn written(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if matches!(result, Poll::Ready(Ok(1..))) {
            self.record();
        }
        result
    }
}

impl From<UnixStream> for SandboxStream {
    /// Returns a stream whose traffic is not counted.
    fn from(stream: UnixStream) -> Self {
        Self::new(stream.into(), None, 0)
    }
}

impl AsyncRead for SandboxStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.inner).poll_read(context, buffer);
        if buffer.filled().len().saturating_sub(before) > self.max_uncounted {
            self.record();
        }
        result
    }
}

impl AsyncWrite for SandboxStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(context, data);
        self.written(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write_vectored(context, pieces);
        self.written(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Returns a stream to `port`, its other end, and the recorder of its uses.
    fn stream(port: u16) -> (SandboxStream, UnixStream, SandboxUse) {
        let (near, far) = UnixStream::pair().unwrap();
        let uses = SandboxUse::default();
        (
            SandboxStream::new(near.into(), Some(uses.clone()), port),
            far,
            uses,
        )
    }

    #[tokio::test]
    async fn traffic_in_both_directions_is_a_use() {
        let (mut near, mut far, uses) = stream(80);
        assert!(!uses.take_use());
        near.write_all(b"request").await.unwrap();
        assert!(uses.take_use());
        far.write_all(b"a").await.unwrap();
        near.read_u8().await.unwrap();
        assert!(uses.take_use());
        // The end of the stream is no traffic.
        far.shutdown().await.unwrap();
        assert_eq!(near.read(&mut [0; 8]).await.unwrap(), 0);
        assert!(!uses.take_use());
    }

    #[tokio::test]
    async fn a_keepalive_of_the_agent_is_no_use() {
        let agent = u16::try_from(ENVD_PORT).unwrap();
        let (mut near, mut far, uses) = stream(agent);
        for (size, is_use) in [
            (MAX_KEEPALIVE_BYTES, false),
            (MAX_KEEPALIVE_BYTES + 1, true),
        ] {
            far.write_all(&vec![1; size]).await.unwrap();
            assert_eq!(near.read(&mut [0; 1024]).await.unwrap(), size);
            assert_eq!(uses.take_use(), is_use, "{size}");
        }
    }
}
