//! Changes of the settings of an existing sandbox.
//!
//! The *journal* is the database of the daemon with the records of sandboxes and snapshots.
//!
//! The *site* is the network in which a guest runs. Its settings are certificate authorities and a
//! proxy, which are installed in the guest. *Rules* permit or deny connections of the guest. Some
//! rules add headers with secrets to requests.

use super::{OperationError, Sandboxes};
use crate::sandbox::Sandbox;
use crate::sandbox_settings::SandboxSettings;
use crate::site;
use jiffy_agent_client::AgentClient;
use jiffy_api_types::{EventType, SandboxState};
use jiffy_engine_api::{Guest, new_token};
use jiffy_proto::agent::{ENVD_PORT, SiteSettings};
use std::sync::Arc;
use std::time::Duration;

/// Time limit for the installation of authorities in a guest.
const INSTALL_LIMIT: Duration = Duration::from_secs(10);

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
            let (before, site) = (record.network_rules(), record.settings.guest_site());
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
            let rules = record.network_rules();
            this.0
                .engines
                .default_engine()
                .check_network(&rules)
                .map_err(OperationError::Network)?;
            let guest = entry.guest().filter(|_| rules != before);
            if let Some(guest) = entry
                .guest()
                .filter(|_| record.settings.guest_site() != site)
            {
                // Rules for headers intercept TLS connections with certificates of an authority of
                // the sandbox. Install the authority before such rules apply. Without the rules,
                // no connection uses its certificates.
                let site = site::joined(&this.0.site, &record.settings.guest_site());
                this.install_site(&record, guest, &site).await?;
            }
            // Change the network before the journal: rules that it rejects must not be recorded.
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

    /// Installs authorities and proxy in a running guest.
    async fn install_site(
        &self,
        record: &Sandbox,
        guest: Arc<dyn Guest>,
        site: &SiteSettings,
    ) -> Result<(), OperationError> {
        let agent = AgentClient::new(move || {
            let guest = guest.clone();
            async move { guest.connect(ENVD_PORT).await }
        });
        let agent = match &record.agent_token {
            Some(token) => agent.with_token(token),
            None => agent,
        };
        let failed = |problem: String| {
            OperationError::Network(format!(
                "cannot add the certificate authority for `rules` to the sandbox: {problem}"
            ))
        };
        tokio::time::timeout(INSTALL_LIMIT, agent.install_site(site))
            .await
            .map_err(|e| failed(e.to_string()))?
            .map_err(|e| failed(e.to_string()))
    }
}
