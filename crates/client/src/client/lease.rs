//! Leases of sandboxes, which remove a sandbox when this process exits.

use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::task::JoinHandle;

/// Interval between two heartbeats, which prevent proxies from closing the idle connection.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(20);

/// Connection whose end removes a sandbox.
pub struct SandboxLease(JoinHandle<()>);

impl SandboxLease {
    /// Starts the heartbeats on `stream`, the connection of the lease.
    pub(super) fn start(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        Self(tokio::spawn(async move {
            let (mut from, mut to) = split(stream);
            let heartbeats = async {
                loop {
                    tokio::time::sleep(HEARTBEAT_INTERVAL).await;
                    // The daemon ignores the bytes.
                    if to.write_all(b".").await.is_err() {
                        return;
                    }
                }
            };
            let mut byte = [0];
            // When either side is done, the task ends and closes the connection.
            tokio::select! {
                () = heartbeats => {}
                // The daemon sends no data. It closes the connection when the sandbox terminates.
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
