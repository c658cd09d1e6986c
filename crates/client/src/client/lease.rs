//! Sandboxes that end with this process.

use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::task::JoinHandle;

/// Time between two bytes, which keep proxies from closing a connection that is silent.
const HEARTBEAT: Duration = Duration::from_secs(20);

/// A connection whose end is the end of a sandbox.
pub struct SandboxLease(JoinHandle<()>);

impl SandboxLease {
    /// The lease at the other end of `stream`.
    pub(super) fn keep(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        Self(tokio::spawn(async move {
            let (mut from, mut to) = split(stream);
            let beat = async {
                loop {
                    tokio::time::sleep(HEARTBEAT).await;
                    if to.write_all(b".").await.is_err() {
                        return;
                    }
                }
            };
            let mut byte = [0];
            tokio::select! {
                () = beat => {}
                // The other side says nothing; it closes when the sandbox is gone.
                _ = from.read(&mut byte) => {}
            }
        }))
    }
}

impl Drop for SandboxLease {
    fn drop(&mut self) {
        self.0.abort();
    }
}
