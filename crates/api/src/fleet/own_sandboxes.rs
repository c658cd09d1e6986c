//! Decides whether this host may answer a call on one of its sandboxes. After a restart, a sandbox
//! may have moved, and must first be compared with its record in the store.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox.

use super::{COMPARISON_TIMEOUT, unavailable};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;

impl App {
    /// Like [`Self::has_sandbox`]. After a registration of this host in the fleet, waits until the
    /// sandbox was compared with its head: other hosts may have changed it.
    pub(super) async fn has_compared_sandbox(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<bool, ApiError> {
        if let Ok(sandbox) = self.sandbox(caller, id, Liveness::IncludingBroken) {
            let compared = self
                .sandboxes
                .until_compared(sandbox.id(), COMPARISON_TIMEOUT);
            if !compared.await {
                return Err(unavailable(format!(
                    "sandbox {} cannot be used: its host returns to the fleet, and has not \
                     compared it with the store yet; retry",
                    caller.shown_id(sandbox.id())
                )));
            }
        }
        Ok(self.has_sandbox(caller, id))
    }

    /// Returns whether this host answers a call on `id`. The answer may be an error: this host also
    /// answers if it has the sandbox, but the caller may not use it.
    pub(super) fn has_sandbox(&self, caller: &Caller, id: &str) -> bool {
        match self.sandbox(caller, id, Liveness::IncludingBroken) {
            Ok(_) => true,
            // Sandboxes of other owners and sandboxes that are being killed do not exist for the
            // caller. If they are on this host, no other host answers.
            Err(error) => {
                error.error_code != "sandbox_not_found" || self.sandboxes.find(id).is_some()
            }
        }
    }
}
