//! Processes inside a guest: their list, and signals to them.

use super::{Observation, answer_of};
use crate::operation_error::OperationError;
use jiffy_agent_client::{ClientError, GuestProcess};

/// Status of an answer to a signal to a process that does not exist, and of the answers of agents
/// that do not know the call.
const NOT_FOUND: u16 = 404;

impl Observation<'_> {
    /// Returns the processes in a sandbox. Runs code in the guest. `None` if the agent of the guest
    /// is of an earlier version, which cannot list processes.
    pub async fn processes(self, id: &str) -> Result<Option<Vec<GuestProcess>>, OperationError> {
        let agent = self.0.entry(id)?.agent("list the processes of")?;
        answer_of(id, async { found(agent.guest_processes().await) }).await
    }

    /// Sends signal number `signal` to the process `pid` in a sandbox, if it has this start time.
    /// Returns whether the process existed.
    pub async fn signal_process(
        self,
        id: &str,
        pid: u32,
        signal: i32,
        start_ticks: Option<u64>,
    ) -> Result<bool, OperationError> {
        let agent = self.0.entry(id)?.agent("send a signal to a process of")?;
        let sent = async { found(agent.signal_process(pid, signal, start_ticks).await) };
        Ok(answer_of(id, sent).await?.is_some())
    }
}

/// Returns `None` for an answer with status 404.
fn found<T>(answer: Result<T, ClientError>) -> Result<Option<T>, ClientError> {
    match answer {
        Err(ClientError::Status { status, .. }) if status == NOT_FOUND => Ok(None),
        answer => answer.map(Some),
    }
}
