//! Adoption: takes over guests that continued to run while no daemon was running.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! The *warm pool* has guests that were started in advance and wait for a create.

use super::recover::Orphan;
use super::{OperationError, Sandboxes};
use crate::sandbox::Sandbox;
use crate::snapshot::Snapshot;
use jiffy_api_types::SandboxState;
use jiffy_engine_api::{EngineError, Guest};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::task::JoinSet;

impl Sandboxes {
    /// Adopts the guests of running sandboxes, and stops all other guests of an earlier daemon.
    /// Completes the `storing` snapshots, whose memory is held by adopted guests, in the
    /// background.
    pub(super) async fn adopt(
        &self,
        orphans: Vec<Orphan>,
        storing: Vec<Snapshot>,
    ) -> Result<(), OperationError> {
        for engine in self.0.engines.all() {
            let of_engine = orphans.iter().filter(|o| o.engine == engine.name());
            let handles: Vec<_> = of_engine.map(|o| o.guest.handle.clone()).collect();
            // End these guests before the adoption, so that they release their memory and network
            // slots first.
            match engine.end_unadopted(&handles).await {
                Ok(0) => {}
                Ok(count) => tracing::info!(count, "stopped guests without a sandbox"),
                Err(e) => tracing::error!(
                    engine = engine.name(),
                    error = %e, "cannot find guests without a sandbox"
                ),
            }
        }
        let mut storing: HashMap<_, _> = storing
            .into_iter()
            .map(|record| (record.id.clone(), record))
            .collect();
        // The guests are adopted concurrently: an engine waits for the answer of each guest.
        let mut work = JoinSet::new();
        for orphan in orphans {
            let this = self.clone();
            let captured = orphan
                .guest
                .captured
                .as_ref()
                .and_then(|id| storing.remove(id));
            work.spawn(async move {
                let guest = match this.0.engines.get(&orphan.engine) {
                    Ok(engine) => engine.adopt(&orphan.guest).await,
                    Err(e) => Err(e),
                };
                this.register_adopted(&orphan.sandbox, guest, captured)
                    .await
            });
        }
        let adopted = work.join_all().await.into_iter().collect();
        self.0.usage.forget_unadopted();
        adopted
    }

    /// Registers a guest of an earlier daemon with its sandbox. If the guest could not be adopted,
    /// marks the sandbox as broken.
    async fn register_adopted(
        &self,
        id: &str,
        guest: Result<Arc<dyn Guest>, EngineError>,
        captured: Option<Snapshot>,
    ) -> Result<(), OperationError> {
        let entry = self.0.entry(id)?;
        match guest {
            Ok(guest) => {
                // Records of early versions have no engine.
                entry.set_record(Sandbox {
                    engine: Some(guest.engine().to_owned()),
                    ..entry.record()
                });
                entry.replace_guest(Some(guest.clone()));
                entry.adopt_meter();
                self.watch(&entry, &guest);
                self.serve_lost_volumes(&entry);
                if let Some(captured) = captured {
                    self.finish_captured(entry, guest, captured).await;
                }
                Ok(())
            }
            Err(e) => {
                // The engine has terminated a guest that it could not adopt.
                let cause = format!("its guest could not be adopted by a new daemon: {e}");
                let record = entry.record_in(SandboxState::broken(cause));
                self.record_write_behind(&entry, record.clone());
                self.report_broken(&record);
                if let Some(captured) = captured {
                    self.snapshots().lose(&captured, &e.to_string());
                    self.discard_captured(&captured);
                }
                Ok(())
            }
        }
    }

    /// Stops the warm pool, and returns once all of its resources are released.
    pub async fn close(&self) {
        self.0.pool.clear();
        self.0.engines.close().await;
    }
}
