//! [`GuestStream`]: a byte stream between the daemon and a server in a guest.

use std::any::Any;
use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// Stream to a server in a guest.
pub enum GuestStream {
    /// Stream over the engine's own transport, relayed by the agent.
    Relayed(UnixStream),
    /// TCP connection over the guest's network interface.
    Direct {
        /// Registration in the list of connections that are closed when the guest ends. Dropped
        /// before `stream`, so that the list never contains a closed descriptor.
        entry: Box<dyn Any + Send + Sync>,
        /// Connection.
        stream: TcpStream,
    },
}

impl fmt::Debug for GuestStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Relayed(_) => "GuestStream::Relayed",
            Self::Direct { .. } => "GuestStream::Direct",
        })
    }
}

impl From<UnixStream> for GuestStream {
    fn from(stream: UnixStream) -> Self {
        Self::Relayed(stream)
    }
}

/// Evaluates the same expression for the pinned inner stream of either variant.
macro_rules! stream {
    ($this:expr, $stream:ident => $work:expr) => {
        match $this.get_mut() {
            GuestStream::Relayed(stream) => {
                let $stream = Pin::new(stream);
                $work
            }
            GuestStream::Direct { stream, .. } => {
                let $stream = Pin::new(stream);
                $work
            }
        }
    };
}

impl AsyncRead for GuestStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        stream!(self, stream => stream.poll_read(context, buffer))
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        stream!(self, stream => stream.poll_write(context, data))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        stream!(self, stream => stream.poll_write_vectored(context, pieces))
    }

    fn is_write_vectored(&self) -> bool {
        // Both inner streams support vectored writes.
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        stream!(self, stream => stream.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        stream!(self, stream => stream.poll_shutdown(context))
    }
}
