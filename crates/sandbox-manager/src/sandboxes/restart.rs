//! `restart`: terminates all processes of a sandbox and runs its start command again.

use super::{OperationError, Sandboxes};
use crate::sandbox::{Sandbox, SandboxOperation};
use jiffy_agent_client::AgentClient;
use jiffy_api_types::{EventType, MAX_RESTART_GRACE_MS};
use jiffy_proto::agent::ENVD_PORT;
use std::time::Duration;

/// Maximum time for processes to exit after the first signal.
pub const MAX_RESTART_GRACE: Duration = Duration::from_millis(MAX_RESTART_GRACE_MS);
/// Time that the agent has for its answer, in addition to the grace period of the processes.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

impl Sandboxes {
    /// Terminates all processes of a running sandbox and runs the start command of its template.
    /// Processes have `grace` to exit by themselves. The kernel, disk, id and network remain.
    pub async fn restart(&self, id: &str, grace: Duration) -> Result<Sandbox, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("restart", &entry.id(), async move {
            // The lock is held during the restart, so that no snapshot sees a half restarted guest.
            let _op_guard = entry.op_lock().lock().await;
            // Like a connection, a restart requires a running sandbox.
            let guest = entry.running(SandboxOperation::Connect, "restart")?;
            let record = entry.record();
            let connector = guest.clone();
            let agent = AgentClient::new(move || {
                let guest = connector.clone();
                async move { guest.connect(ENVD_PORT).await }
            });
            let agent = match &record.agent_token {
                Some(token) => agent.with_token(token),
                None => agent,
            };
            let grace = grace.min(MAX_RESTART_GRACE);
            let failed = |problem: String| OperationError::Restart {
                id: record.id.clone(),
                problem,
            };
            let request = agent.end_processes(grace);
            tokio::time::timeout(grace + ANSWER_LIMIT, request)
                .await
                .map_err(|e| failed(e.to_string()))?
                .map_err(|e| failed(e.to_string()))?;
            this.templates()
                .start_up(&record.template, &guest, record.agent_token.clone())
                .await?;
            this.report(EventType::SandboxRestarted, &record);
            Ok(entry.record())
        })
        .await
    }
}
