//! Streams large input to a process in the sandbox.

use crate::client::AgentClient;
use crate::error::ClientError;
use crate::frame;
use crate::request_body::RequestBody;
use bytes::Bytes;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Maximum length of the input in one message, in bytes before base64. It is large enough for
/// throughput, and a multiple of 3, so that full messages have no base64 padding.
pub(crate) const CHUNK_BYTES: usize = 48 * 1024;

/// Open stream to the input of a process. At most a few hundred KiB are buffered. Then `write`
/// waits until the process reads.
pub struct StdinStream {
    /// `None` if the stream is closed.
    pieces: Option<mpsc::Sender<Bytes>>,
    call: JoinHandle<Result<(), ClientError>>,
    /// Field of an input message that names its destination: `stdin` or `pty`.
    field: &'static str,
}

impl StdinStream {
    /// Opens a stream to a process's stdin or terminal. `pty` states whether the process has a
    /// terminal.
    pub async fn open(client: &AgentClient, pid: u32, pty: bool) -> Result<Self, ClientError> {
        let (pieces, body) = RequestBody::channel();
        let first = frame::message(&json!({ "start": { "process": { "pid": pid } } }))?;
        // Ignore the error: the channel is empty, and this function owns the receiver.
        let _ = pieces.send(first).await;
        let client = client.clone();
        // The response ends when the agent has passed on all input, or with the reason of a
        // failure.
        let call = tokio::spawn(async move {
            let mut frames = client
                .stream("/process.Process/StreamInput", None, &[], body)
                .await?;
            while frames.next().await?.is_some() {}
            Ok(())
        });
        Ok(Self {
            pieces: Some(pieces),
            call,
            field: if pty { "pty" } else { "stdin" },
        })
    }

    /// Writes all bytes. If the agent closed the stream, returns the reason: the process has exited
    /// or has closed its stdin.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), ClientError> {
        // One frame per chunk.
        for piece in bytes.chunks(CHUNK_BYTES) {
            let Some(pieces) = &self.pieces else {
                return Err(closed());
            };
            if pieces.send(frame::input(self.field, piece)).await.is_err() {
                // The receiver is dropped only when the call has ended: report the call's error.
                self.pieces = None;
                return Err(self.outcome().await.err().unwrap_or_else(closed));
            }
        }
        Ok(())
    }

    /// Waits until the process has received all bytes. Its stdin remains open: see
    /// [`AgentClient::close_stdin`].
    pub async fn finish(mut self) -> Result<(), ClientError> {
        self.pieces = None;
        self.outcome().await
    }

    /// Waits for the result of the call.
    async fn outcome(&mut self) -> Result<(), ClientError> {
        match (&mut self.call).await {
            Ok(result) => result,
            Err(e) => Err(ClientError::Protocol(format!(
                "the stream was aborted: {e}"
            ))),
        }
    }
}

fn closed() -> ClientError {
    ClientError::Protocol("the stream to the process is closed".to_owned())
}
