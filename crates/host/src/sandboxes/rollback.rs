//! `rollback`: the same sandbox, as it was.

use super::wake_options::ReviveReason;
use super::{OperationError, Sandboxes};
use crate::records::{SandboxOperation, SandboxRecord};
use jiffy_engine::Engine;
use std::time::Instant;

impl<E: Engine> Sandboxes<E> {
    /// Puts a sandbox back to a snapshot of its own lineage or of a relative with the same template
    /// and size. It keeps its id; what it was before runs until the restored guest has answered,
    /// and is then gone.
    pub async fn rollback(
        &self,
        id: &str,
        snapshot: &str,
    ) -> Result<SandboxRecord, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        let owner = entry.record().settings.owner;
        let here = self.snapshots().pin_or_fetch(owner.as_deref(), snapshot);
        let (snapshot, pin) = here.await?;
        self.perform("rollback", &entry.id(), async move {
            let _pin = pin;
            let _op_guard = entry.op_lock.lock().await;
            let asked = Instant::now();
            let record = entry.allow(SandboxOperation::Rollback, "roll back")?;
            if (&snapshot.template, snapshot.size) != (&record.template, record.size) {
                return Err(OperationError::Stranger {
                    id: record.id,
                    snapshot: snapshot.id,
                    ours: describe(&record.template, record.size),
                    theirs: describe(&snapshot.template, snapshot.size),
                });
            }
            // One that has a guest keeps its place, also where there is no other.
            if entry.has_reservation() {
                this.0.admission.bears_exchange()?;
            } else {
                entry.set_reservation(Some(this.admit(record.size)?));
            }
            let (template, id) = (&record.template, &snapshot.id);
            let left = record.snapshot.clone();
            let record = this
                .revive(&entry, asked, template, id, ReviveReason::Rollback)
                .await?;
            this.snapshots().gc(left);
            Ok(record)
        })
        .await
    }
}

fn describe(template: &str, size: jiffy_engine::SandboxSize) -> String {
    format!(
        "{template} with {} vCPUs, {} MiB memory, {} MiB disk",
        size.vcpus, size.memory_mib, size.disk_mib
    )
}
