//! First bytes of a connection, read before buffers are made for it.

use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};

/// Length of what a client of HTTP/2 begins with (RFC 9113, 3.4). Little, because it is kept for
/// every connection on which nothing was said yet.
const MAX_FIRST: usize = 24;

/// Bytes that a client sent first.
#[derive(Debug, Default)]
pub(crate) struct First {
    bytes: [u8; MAX_FIRST],
    length: usize,
}

impl First {
    /// Reads what comes first: not beyond where a client of HTTP/2 has to say so.
    pub async fn read<T: AsyncRead + Unpin>(stream: &mut T) -> io::Result<Self> {
        let mut first = Self::default();
        first.length = stream.read(&mut first.bytes).await?;
        Ok(first)
    }

    /// Whether there is nothing: the client is done already.
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Moves as much as fits into `buf`; whether there was anything.
    pub fn give(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let given = self.length.min(buf.remaining());
        buf.put_slice(self.bytes.get(..given).unwrap_or_default());
        self.bytes.copy_within(given..self.length, 0);
        self.length -= given;
        given > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_read_first_is_given_in_order_and_once() {
        let text = b"GET / HTTP/1.1 and more than fits";
        let mut stream = &text[..];
        let mut first = First::read(&mut stream).await.unwrap();
        assert_eq!(stream.len(), text.len() - MAX_FIRST);
        let mut given = Vec::new();
        let mut space = [0; 10];
        loop {
            let mut buffer = ReadBuf::new(&mut space);
            if !first.give(&mut buffer) {
                break;
            }
            given.extend_from_slice(buffer.filled());
        }
        assert_eq!(given, text[..MAX_FIRST]);
        assert!(First::read(&mut &b""[..]).await.unwrap().is_empty());
    }
}
