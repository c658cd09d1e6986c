//! Archives of files between host and sandbox. Archives of a sandbox are unpacked as untrusted
//! archives.

use anyhow::Context;
use bytes::{Buf, Bytes};
use jiffy_agent_client::FileReader;
use jiffy_archive::{UnpackOptions, UnpackOwner, unpack};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use tokio::sync::mpsc;

/// Maximum number of chunks between the connection and the thread that reads or writes files.
pub const QUEUED_CHUNKS: usize = 4;
/// Permissions of unpacked files. Their own permissions may not allow reading.
const MODE: u32 = 0o700;

/// Unpacks a download below a directory. Fails if its files have more than `max_bytes`.
pub async fn receive(
    mut reader: FileReader,
    directory: &Path,
    max_bytes: u64,
) -> anyhow::Result<()> {
    let root = File::open(directory)?;
    let options = UnpackOptions {
        owner: UnpackOwner::Process,
        mode: Some(MODE),
        confined: true,
        rename: None,
        max_bytes: Some(max_bytes),
        max_entries: Some(2 * crate::limits::MAX_FILES as u64),
    };
    let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
    let task = tokio::task::spawn_blocking(move || {
        unpack(ChunkReader::new(receiver), root.as_fd(), &options)
    });
    // Headers of many small files can be as large as their contents.
    let mut remaining = max_bytes.saturating_mul(2);
    let forward = async {
        while let Some(chunk) = reader.next().await? {
            remaining = remaining
                .checked_sub(chunk.len() as u64)
                .context("the archive is too large")?;
            // The unpacker may have stopped; its error is reported below.
            if sender.send(chunk).await.is_err() {
                break;
            }
        }
        anyhow::Ok(())
    };
    let forwarded = forward.await;
    drop(sender);
    let unpacked = task.await?;
    // A failed connection is reported instead of the truncated archive that it causes.
    forwarded?;
    unpacked.context("cannot unpack files of the sandbox")?;
    Ok(())
}

/// Writer into a channel.
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

/// Reader from a channel.
struct ChunkReader {
    chunks: mpsc::Receiver<Bytes>,
    chunk: Bytes,
}

impl ChunkReader {
    fn new(chunks: mpsc::Receiver<Bytes>) -> Self {
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
