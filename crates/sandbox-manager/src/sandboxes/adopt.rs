//! Guests that ran on while there was no daemon.

use super::{OperationError, SandboxFigures, Sandboxes};
use crate::records::{SandboxRecord, SandboxState, SnapshotRecord};
use jiffy_engine_api::{Engine, EngineError, Guest, KeptGuest};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::task::JoinSet;

impl<E: Engine> Sandboxes<E> {
    /// Takes over the guests of sandboxes that run, and ends all others that an earlier process
    /// kept. Snapshots that are `storing` are completed behind that.
    pub(super) async fn adopt(
        &self,
        orphans: Vec<(String, KeptGuest)>,
        storing: Vec<SnapshotRecord>,
    ) -> Result<(), OperationError> {
        let known: Vec<_> = orphans.iter().map(|(_, o)| o.handle.clone()).collect();
        match self.0.engine.end_unadopted(&known).await {
            Ok(0) => {}
            Ok(ended) => tracing::info!(ended, "guests that belonged to no sandbox were ended"),
            Err(e) => tracing::error!("cannot look for guests that belong to no sandbox: {e}"),
        }
        let mut storing: HashMap<_, _> = storing
            .into_iter()
            .map(|record| (record.id.clone(), record))
            .collect();
        let mut work = JoinSet::new();
        for (id, orphan) in orphans {
            let this = self.clone();
            let captured = orphan.captured.as_ref().and_then(|id| storing.remove(id));
            work.spawn(async move {
                let guest = this.0.engine.adopt(&orphan).await;
                this.adopted(&id, guest, captured).await
            });
        }
        work.join_all().await.into_iter().collect()
    }

    async fn adopted(
        &self,
        id: &str,
        guest: Result<E::Guest, EngineError>,
        captured: Option<SnapshotRecord>,
    ) -> Result<(), OperationError> {
        let entry = self.0.entry(id)?;
        match guest {
            Ok(guest) => {
                let guest = Arc::new(guest);
                // Records of earlier versions do not tell.
                entry.set_record(SandboxRecord {
                    engine: Some(guest.engine().to_owned()),
                    ..entry.record()
                });
                entry.replace_guest(Some(guest.clone()));
                self.watch(&entry, &guest);
                if let Some(captured) = captured {
                    self.finish_captured(entry, guest, captured).await;
                }
                Ok(())
            }
            Err(e) => {
                let cause =
                    format!("the daemon was stopped while it ran, and did not find it again: {e}");
                let record = entry.record_in(SandboxState::broken(cause));
                self.record_write_behind(&entry, record);
                if let Some(captured) = captured {
                    self.snapshots().lose(&captured, &e.to_string());
                    self.0.engine.discard_captured(&captured.id);
                }
                Ok(())
            }
        }
    }

    /// Ends what waits to be somebody, and returns when nothing is left of it.
    pub async fn close(&self) {
        self.0.pool.clear();
        self.0.engine.close().await;
    }
}

impl<E: Engine> SandboxFigures<'_, E> {
    /// Returns the count of guests that run on when this process ends, for the next daemon to find.
    pub fn kept(self) -> usize {
        let running = self.0.indexes.running.lock().clone();
        let entries = self.0.entries.lock();
        let running = running.iter().filter_map(|id| entries.get(id));
        running.filter(|e| e.guest().is_some()).count()
    }
}
