//! What was agreed about a sandbox, changed while it lives.

use super::{OperationError, Sandboxes};
use crate::record::{SandboxRecord, State};
use crate::terms::Terms;
use jiffy_engine::Engine;

impl<E: Engine> Sandboxes<E> {
    /// Changes the terms of a sandbox by `change`, which sees those in force. Its time and its secrets are not changed by this.
    pub async fn change_terms(
        &self,
        id: &str,
        change: impl FnOnce(&mut Terms) + Send + 'static,
    ) -> Result<SandboxRecord, OperationError> {
        let (this, entry) = (self.clone(), self.entry(id)?);
        self.perform("change_terms", &entry.id(), async move {
            let _turn = entry.turn.lock().await;
            let mut record = entry.record();
            if record.state == State::Killed {
                return Err(entry.refuse("change the terms of"));
            }
            change(&mut record.terms);
            this.commit(&entry, record.clone(), &[])?;
            Ok(record)
        })
        .await
    }
}
