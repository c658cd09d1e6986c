//! Client of the agent in a sandbox, for the daemon itself.

use super::SandboxEntry;
use crate::operation_error::OperationError;
use crate::sandbox::SandboxOperation;
use jiffy_agent_client::AgentClient;
use jiffy_proto::agent::ENVD_PORT;

impl SandboxEntry {
    /// Returns a client of the agent, whose requests do not count as use of the sandbox. `verb`
    /// names the operation of the caller in errors.
    pub fn agent(&self, verb: &'static str) -> Result<AgentClient, OperationError> {
        let guest = self.running(SandboxOperation::Connect, verb)?;
        let agent = AgentClient::new(move || {
            let guest = guest.clone();
            async move { guest.connect(ENVD_PORT).await }
        });
        Ok(
            match self.with_record(|record| record.agent_token.clone()) {
                Some(token) => agent.with_token(token),
                None => agent,
            },
        )
    }
}
