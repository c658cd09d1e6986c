//! Operators' commands (`jiffy fleet drain` and others). Any member accepts them, and forwards them
//! to the coordinator.

use super::{Members, Node, NodeError};
use crate::node::executor::Command;
use crate::node::query::{Answer, Operation, Query};
use jiffy_fleet_core::{MemberId, MembershipError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Maximum time from the acceptance of a command until this member sees its effect. The coordinator
/// writes its record of the members within 3 s, and the members request changes every 2 s.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(12);

impl Node {
    /// Sends a command to the coordinator, and waits until it was committed and this member sees
    /// its effect.
    ///
    /// # Errors
    /// [`NodeError::Membership`] if the command is not possible: nothing was changed.
    /// [`NodeError::Unconfirmed`] if it was accepted, but not confirmed in time.
    pub async fn operate(&self, operation: Operation) -> Result<(), NodeError> {
        let no_coordinator = || MembershipError::NotCoordinator(None);
        let coordinator = self.members().coordinator();
        let (member, address) = coordinator.ok_or_else(no_coordinator)?;
        let query = Query::Operate(operation);
        match self.query(member, &address, query).await {
            Some(Answer::Operated(None)) => {}
            Some(Answer::Operated(Some(error))) => return Err(error.into()),
            _ => return Err(no_coordinator().into()),
        }
        let confirmed = async {
            let mut known = self.members();
            let member = operation.member();
            let is_done = |known: &Members| match operation {
                Operation::Remove(_) => known.is_removed(member),
                _ => known.row(member).map(|row| row.state) == Some(operation.state()),
            };
            while !is_done(&known) {
                known = self.members_changed(&known).await;
            }
        };
        let confirmed = timeout(CONFIRM_TIMEOUT, confirmed).await;
        confirmed.map_err(|_| NodeError::Unconfirmed(operation.member()))
    }

    /// Returns the answer of the coordinator to a command.
    pub(super) async fn answer_operation(&self, operation: Operation) -> Result<Answer, NodeError> {
        let (sender, result) = oneshot::channel();
        self.try_send(Command::Operate(operation, sender))?;
        let result = result.await.map_err(|_| NodeError::Stopped)?;
        Ok(Answer::Operated(result.err()))
    }

    /// Accepts records of the fleet on this member that are older than those read before. Returns
    /// whether the records were older.
    pub(super) async fn accept_restore(&self) -> Result<bool, NodeError> {
        let (sender, accepted) = oneshot::channel();
        self.try_send(Command::AcceptRestore(sender))?;
        accepted.await.map_err(|_| NodeError::Stopped)
    }

    /// Accepts records on all members that are older than those read before, after an operator has
    /// restored them. Returns the members that have accepted them, and the members that did not
    /// answer.
    ///
    /// # Errors
    /// [`NodeError`] if the node of this member is busy or has stopped.
    pub async fn accept_restore_everywhere(
        &self,
    ) -> Result<(Vec<MemberId>, Vec<MemberId>), NodeError> {
        let (mut accepted, mut missing) = (Vec::new(), Vec::new());
        if self.accept_restore().await? {
            accepted.push(self.id());
        }
        for (member, answer) in self.query_all(&Query::AcceptRestore).await {
            match answer {
                Some(Answer::Accepted(true)) => accepted.push(member),
                Some(Answer::Accepted(false)) => {}
                _ => missing.push(member),
            }
        }
        accepted.sort();
        missing.sort();
        Ok((accepted, missing))
    }
}
