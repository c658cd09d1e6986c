//! Look-up of a sandbox that a caller resumes. Either the sandbox is on this host, or another host
//! of the fleet has stored it when it was paused, and this host takes it over.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::{Liveness, short};
use jiffy_sandbox_manager::Sandbox;

/// Sandbox that can be resumed.
#[derive(Debug)]
pub(crate) enum Resumable {
    /// This host has the sandbox.
    Here(Sandbox),
    /// The sandbox is paused in the store, where another host stored it.
    Stored(Sandbox),
    /// Like `Stored`; the lost host of the sandbox may have a newer state.
    Older(Sandbox),
}

impl Resumable {
    /// Returns the sandbox.
    pub(crate) fn record(&self) -> &Sandbox {
        match self {
            Self::Here(record) | Self::Stored(record) | Self::Older(record) => record,
        }
    }
}

impl App {
    /// Finds a sandbox that the caller may resume: on this host, or in the store.
    pub(crate) async fn resumable(&self, caller: &Caller, id: &str) -> Result<Resumable, ApiError> {
        self.resumable_from(caller, id, false).await
    }

    /// Like [`Self::resumable`]. With `or_older`, also finds the newest stored state of a sandbox
    /// whose host was lost and may have a newer state.
    pub(crate) async fn resumable_from(
        &self,
        caller: &Caller,
        id: &str,
        or_older: bool,
    ) -> Result<Resumable, ApiError> {
        let missing = match self.sandbox(caller, id, Liveness::Resumable) {
            Ok(record) => return Ok(Resumable::Here(record)),
            Err(e) if e.error_code == "sandbox_not_found" && !caller.is_read_only() => e,
            Err(e) => return Err(e),
        };
        if !self.sandboxes.shares_sandboxes() {
            return Err(missing);
        }
        let fleet = self.fleet.as_ref();
        let lost = fleet.and_then(|fleet| fleet.lost_sandbox(caller, id));
        let (owner, id) = match &lost {
            Some(lost) => (lost.record.owner(), lost.record.id()),
            None => (caller.owner_scope(), id),
        };
        let stored = self.sandboxes.stored_or_older(owner, id, or_older).await;
        let stored = match (stored, &lost) {
            // The description of the loss names host and time.
            (Err(e), Some(lost)) if e.is_host_lost() => return Err(lost.error_of_newer(caller)),
            (Ok(None), Some(lost)) => return Err(lost.error(caller)),
            (stored, _) => stored?,
        };
        if let (Some(fleet), Some(record)) = (fleet, &stored) {
            fleet.check_volumes(record)?;
        }
        let resumable = stored.map(if or_older {
            Resumable::Older
        } else {
            Resumable::Stored
        });
        resumable.ok_or_else(|| {
            if self.fleet.is_some() {
                return missing;
            }
            let id = short(id);
            let message = format!("sandbox `{id}` exists neither on this host nor in the store");
            ApiError::not_found("sandbox_not_found", message)
        })
    }
}
