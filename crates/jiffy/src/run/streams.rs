//! Standard streams of this process. Each stream has a thread, so that a slow reader blocks only
//! its own stream.

use std::io::{self, Read, Write};
use std::thread;
use tokio::sync::{mpsc, oneshot};

/// Maximum number of queued chunks between a thread and the event loop.
const QUEUED_CHUNKS: usize = 8;
const CHUNK_BYTES: usize = 32 * 1024;

/// Returns the chunks of standard input. The channel is closed at the end of the input.
pub fn input() -> mpsc::Receiver<Vec<u8>> {
    let (sender, chunks) = mpsc::channel(QUEUED_CHUNKS);
    thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    // The receiver is dropped when the process accepts no further input.
                    if sender.blocking_send(buffer[..n].to_vec()).is_err() {
                        break;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // Input that cannot be read ends, as for other programs.
                Err(_) => break,
            }
        }
    });
    chunks
}

/// Output stream of this process.
pub struct Output {
    chunks: mpsc::Sender<Vec<u8>>,
    /// Result of the writing thread. `None` after a failed `write`, which has returned the result.
    done: Option<oneshot::Receiver<io::Result<()>>>,
}

impl Output {
    /// Standard output.
    pub fn stdout() -> Self {
        Self::new(io::stdout())
    }

    /// Standard error.
    pub fn stderr() -> Self {
        Self::new(io::stderr())
    }

    /// Starts a thread that writes the queued chunks to `to`. A blocked terminal therefore does not
    /// block the runtime.
    fn new(mut to: impl Write + Send + 'static) -> Self {
        let (chunks, mut queue) = mpsc::channel::<Vec<u8>>(QUEUED_CHUNKS);
        let (result_sender, done) = oneshot::channel();
        thread::spawn(move || {
            let mut result = Ok(());
            while let Some(chunk) = queue.blocking_recv() {
                // Flushed for each chunk: the output may be interactive.
                result = to.write_all(&chunk).and_then(|()| to.flush());
                if result.is_err() {
                    break;
                }
            }
            // The result is sent before the queue is closed, so that the caller of a failed send
            // finds the reason.
            let _ = result_sender.send(result);
            drop(queue);
        });
        Self {
            chunks,
            done: Some(done),
        }
    }

    /// Queues a chunk. Fails if the stream cannot be written.
    pub async fn write(&mut self, chunk: Vec<u8>) -> io::Result<()> {
        if self.chunks.send(chunk).await.is_ok() {
            return Ok(());
        }
        match self.done.take() {
            Some(done) => done
                .await
                .unwrap_or(Ok(()))
                .and(Err(io::ErrorKind::BrokenPipe.into())),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Waits until all queued chunks are written.
    pub async fn finish(self) -> io::Result<()> {
        drop(self.chunks);
        match self.done {
            Some(done) => done.await.unwrap_or(Ok(())),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_output_is_written_in_order() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut output = Output::new(writer);
        for i in 0..100u8 {
            output.write(vec![i]).await.unwrap();
        }
        output.finish().await.unwrap();
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, (0..100).collect::<Vec<u8>>());
    }

    #[tokio::test]
    async fn a_closed_pipe_is_reported() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let mut output = Output::new(writer);
        let error = loop {
            if let Err(e) = output.write(vec![0; 10]).await {
                break e;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        assert!(output.finish().await.is_err());
    }
}
