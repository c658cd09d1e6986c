//! Changes of the settings of an existing sandbox.

use super::{OperationError, Sandboxes};
use crate::sandbox::Sandbox;
use crate::sandbox_settings::SandboxSettings;
use jiffy_api_types::{EventType, SandboxState};
use jiffy_engine_api::new_token;

impl Sandboxes {
    /// Calls `change` with the present settings of a sandbox, and applies the changed settings. A
    /// change of `timeout_s` does not affect the current deadline.
    pub async fn change_settings(
        &self,
        id: &str,
        change: impl FnOnce(&mut SandboxSettings) + Send + 'static,
    ) -> Result<Sandbox, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        // Metrics and traces contain this name, so it must not change.
        self.perform("change_terms", &entry.id(), async move {
            let _op_guard = entry.op_lock().lock().await;
            let mut record = entry.record();
            if record.state == SandboxState::Killed {
                return Err(entry.refuse("change the settings of"));
            }
            let before = record.settings.rules();
            change(&mut record.settings);
            // A traffic token exists if and only if the ports are restricted.
            match (
                record.settings.network.restrict_traffic,
                &record.traffic_token,
            ) {
                (true, None) => record.traffic_token = Some(new_token()?),
                (false, Some(_)) => record.traffic_token = None,
                _ => {}
            }
            let rules = record.settings.rules();
            this.0
                .engines
                .default_engine()
                .check_network(&rules)
                .map_err(OperationError::Network)?;
            let guest = entry.guest().filter(|_| rules != before);
            // Before the journal: rules that the network rejects must not be recorded.
            if let Some(guest) = &guest {
                let failed = OperationError::engine("change the network of the sandbox");
                guest.set_network(&rules).await.map_err(failed)?;
            }
            if let Err(e) = this.commit(&entry, record.clone(), &[]) {
                if let Some(guest) = &guest {
                    // Restore the rules that the journal contains. Ignore the error: the caller
                    // receives the error of the journal.
                    let _ = guest.set_network(&before).await;
                }
                return Err(e.into());
            }
            if rules != before {
                this.report(EventType::SandboxNetworkChanged, &record);
            }
            Ok(record)
        })
        .await
    }
}
