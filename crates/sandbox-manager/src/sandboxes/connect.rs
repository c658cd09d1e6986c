//! Opens streams into running sandboxes. The API and the gateway call these functions.

use super::{OperationError, Sandboxes};
use crate::sandbox::SandboxOperation;
use jiffy_engine_api::GuestStream;
use tokio::net::UnixStream;

impl Sandboxes {
    /// Opens a stream to `port` in a sandbox.
    pub async fn connect(&self, id: &str, port: u32) -> Result<UnixStream, OperationError> {
        let entry = self.0.entry(id)?;
        let guest = entry.running(SandboxOperation::Connect, "connect to")?;
        guest
            .connect(port)
            .await
            .map_err(|source| OperationError::Connect {
                id: entry.record().id,
                port,
                source,
            })
    }

    /// Connects to TCP `port` in a sandbox over its network interface. Returns `None` if that is
    /// not possible. The caller then connects through the agent.
    pub async fn connect_tcp(&self, id: &str, port: u16) -> Option<GuestStream> {
        let entry = self.0.entry(id).ok()?;
        let guest = entry.running(SandboxOperation::Connect, "connect to");
        guest.ok()?.connect_tcp(port).await
    }
}
