//! Temporary guests: guests that run from a snapshot for a short time and belong to no sandbox.
//!
//! A temporary guest has no record, so it appears in no list and counts towards no limit of a key.
//! It reserves resources of the host like a sandbox, and has no network. The guest is not detached
//! from the daemon: it is terminated when it is dropped, and when the daemon exits. If the daemon
//! was killed, its successor terminates the guests that belong to no sandbox when it starts.

use crate::admission::Reservation;
use crate::sandboxes::operations::OperationGuard;
use crate::sandboxes::snapshot_catalog::SnapshotPin;
use crate::sandboxes::{OperationError, Sandboxes};
use crate::site;
use jiffy_agent_client::AgentClient;
use jiffy_api_types::BootMode;
use jiffy_engine_api::{Guest, NetworkRules, SandboxIdentity, new_id, new_token};
use jiffy_proto::agent::ENVD_PORT;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Guest that is stopped when it is dropped.
pub(super) struct TemporaryGuest {
    guest: Arc<dyn Guest>,
    token: String,
    template: String,
    /// Held until the guest has stopped.
    held: Option<(Reservation, SnapshotPin, OperationGuard)>,
}

impl Drop for TemporaryGuest {
    fn drop(&mut self) {
        let (guest, held) = (self.guest.clone(), self.held.take());
        tokio::spawn(async move {
            guest.stop().await;
            drop(held);
        });
    }
}

impl TemporaryGuest {
    /// Returns a client of the guest's agent.
    pub fn agent(&self) -> AgentClient {
        let guest = self.guest.clone();
        let connect = move || {
            let guest = guest.clone();
            async move { guest.connect(ENVD_PORT).await }
        };
        AgentClient::new(connect).with_token(self.token.clone())
    }

    /// Returns the reference of the template.
    pub fn template(&self) -> &str {
        &self.template
    }
}

impl Sandboxes {
    /// Starts a guest from a snapshot of this host. Waits until the snapshot is stored.
    pub(super) async fn start_temporary(
        &self,
        snapshot: &str,
    ) -> Result<TemporaryGuest, OperationError> {
        let snapshots = self.snapshots();
        let (snapshot, pin) = snapshots.pin_stored(snapshot).await?;
        let mut reservation = self.admit(snapshot.size)?;
        // Count the operation, so that a shutdown waits until the guest has stopped.
        let operation = self.0.operations.count();
        let token = new_token()?;
        let identity = SandboxIdentity {
            id: new_id()?,
            template: Some(snapshot.template.clone()),
            env: BTreeMap::new(),
            access_token: Some(token.clone()),
            // Other guests may already have run from this state, so its TCP connections are
            // invalid: the agent resets them.
            rewound: true,
            network: NetworkRules {
                internet: false,
                ..NetworkRules::default()
            },
            // Certificate authorities and proxy of the host and of the snapshot's sandbox, as in a
            // sandbox that is restored from the snapshot.
            site: site::joined(&self.0.site, &snapshot.site),
        };
        let id = &snapshot.id;
        let start = async {
            // The restored guest has no identity until one is assigned.
            let origin = snapshots.origin(id, BootMode::Snapshot, &identity).await?;
            let guest = origin.unassigned.assign_identity(&identity).await;
            guest.map_err(OperationError::engine(format!("read snapshot {id}")))
        };
        let owner = snapshot.owner.as_deref();
        // The future is boxed, because it is large.
        let guest = self.0.start_pacer.pace(owner, Box::pin(start)).await?;
        reservation.mark_started();
        Ok(TemporaryGuest {
            guest,
            token,
            template: snapshot.template,
            held: Some((reservation, pin, operation)),
        })
    }
}
