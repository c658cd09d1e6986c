//! First bytes of a connection. They are read into a small buffer before the large buffers of the
//! connection are allocated.

use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};

/// Size of the buffer in bytes: the length of the HTTP/2 preface (RFC 9113, 3.4). Each connection
/// that has not sent data yet holds such a buffer, so it must be small.
const MAX_FIRST_BYTES: usize = 24;

/// First bytes of a client.
#[derive(Debug, Default)]
pub(crate) struct FirstBytes {
    bytes: [u8; MAX_FIRST_BYTES],
    /// Number of valid bytes at the start of `bytes`.
    length: usize,
}

impl FirstBytes {
    /// Reads the first bytes, at most the length of the HTTP/2 preface.
    pub async fn read<T: AsyncRead + Unpin>(stream: &mut T) -> io::Result<Self> {
        let mut first = Self::default();
        first.length = stream.read(&mut first.bytes).await?;
        Ok(first)
    }

    /// Returns true if the client closed its side without sending, or all bytes were copied.
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Moves as many bytes as fit into `buf`. Returns true if bytes were moved.
    pub fn copy_to(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let given = self.length.min(buf.remaining());
        buf.put_slice(self.bytes.get(..given).unwrap_or_default());
        // Keep the rest at the start of the buffer.
        self.bytes.copy_within(given..self.length, 0);
        self.length -= given;
        given > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn first_bytes_are_copied_in_order_and_once() {
        let text = b"GET / HTTP/1.1 and more than fits";
        let mut stream = &text[..];
        let mut first = FirstBytes::read(&mut stream).await.unwrap();
        assert_eq!(stream.len(), text.len() - MAX_FIRST_BYTES);
        let mut given = Vec::new();
        let mut space = [0; 10];
        loop {
            let mut buffer = ReadBuf::new(&mut space);
            if !first.copy_to(&mut buffer) {
                break;
            }
            given.extend_from_slice(buffer.filled());
        }
        assert_eq!(given, text[..MAX_FIRST_BYTES]);
        assert!(FirstBytes::read(&mut &b""[..]).await.unwrap().is_empty());
    }
}
