//! Reader and writer on a channel of chunks. A blocking thread packs or unpacks an archive, and a
//! task transfers its chunks.

use bytes::{Buf, Bytes};
use std::io::{self, Read, Write};
use tokio::sync::mpsc;

/// Maximum number of chunks between a thread and a connection.
pub const QUEUED_CHUNKS: usize = 4;

/// Writer into a channel. Blocks while the channel is full.
#[derive(Debug)]
pub struct ChunkWriter(pub mpsc::Sender<Bytes>);

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Bytes::copy_from_slice(bytes));
        // The receiver is dropped if the upload failed, which reports its own error.
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reader from a channel. Blocks while the channel is empty. The end of the channel is the end of
/// the data.
#[derive(Debug)]
pub struct ChunkReader {
    chunks: mpsc::Receiver<Bytes>,
    chunk: Bytes,
}

impl ChunkReader {
    /// Creates a reader.
    pub fn new(chunks: mpsc::Receiver<Bytes>) -> Self {
        let chunk = Bytes::new();
        Self { chunks, chunk }
    }
}

impl Read for ChunkReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() {
            match self.chunks.blocking_recv() {
                Some(chunk) => self.chunk = chunk,
                None => return Ok(0),
            }
        }
        let n = buffer.len().min(self.chunk.len());
        self.chunk.copy_to_slice(&mut buffer[..n]);
        Ok(n)
    }
}
