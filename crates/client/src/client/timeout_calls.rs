//! Calls on timeouts of sandboxes.

use super::Client;
use jiffy_api_types::SetTimeout;

impl Client {
    /// Sets the timeout or the idle timeout of a sandbox, or both.
    pub async fn set_timeout(&self, id: &str, timeouts: &SetTimeout) -> anyhow::Result<()> {
        self.call_sandbox(id, "timeout", timeouts).await
    }
}
