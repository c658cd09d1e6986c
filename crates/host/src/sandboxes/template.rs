//! Templates as snapshots: booted once, and restored from then on.

use super::create::Origin;
use super::entry::lock;
use super::{OperationError, Sandboxes};
use crate::identity::new_id;
use crate::journal::Change;
use crate::record::{Purpose, SnapshotRecord, now_ms};
use jiffy_engine::{
    AfterSnapshot, Arrival, BootMode, Engine, EngineError, Guest, Persona, SandboxSize,
};

impl<E: Engine> Sandboxes<E> {
    /// A guest of `template`: from the warm pool, else from the template's snapshot, which is made first if there is none.
    pub(super) async fn origin_in_template(
        &self,
        template: &str,
        size: SandboxSize,
    ) -> Result<Origin<E::Arrival>, OperationError> {
        let engine = &self.0.engine;
        let failed = || OperationError::engine(format!("use template `{template}`"));
        let fingerprint = engine.fingerprint(template, size).await.map_err(failed())?;
        if let Some((arrival, snapshot)) = self.0.pool.take(&fingerprint) {
            self.refill(&fingerprint, template, &snapshot);
            return Ok(Origin {
                arrival,
                mode: BootMode::WarmPool,
                snapshot: Some(snapshot),
            });
        }
        match self.template_snapshot(template, size, &fingerprint).await {
            Ok(snapshot) => {
                let (_, _pin) = self.pin(&snapshot)?;
                let origin = self
                    .origin_in_snapshot(template, &snapshot, BootMode::Snapshot)
                    .await?;
                self.refill(&fingerprint, template, &snapshot);
                Ok(origin)
            }
            Err(OperationError::Engine {
                source: EngineError::Unsupported { .. },
                ..
            }) => Ok(Origin {
                arrival: engine.boot(template, size).await.map_err(failed())?,
                mode: BootMode::Cold,
                snapshot: None,
            }),
            Err(e) => Err(e),
        }
    }

    fn find_template_snapshot(&self, fingerprint: &str) -> Option<String> {
        lock(&self.0.snapshots)
            .values()
            .find(|s| s.purpose == Purpose::Template && s.kept && s.fingerprint == fingerprint)
            .map(|s| s.id.clone())
    }

    /// The snapshot of the booted template. However many ask at once, one makes it and the others wait.
    async fn template_snapshot(
        &self,
        template: &str,
        size: SandboxSize,
        fingerprint: &str,
    ) -> Result<String, OperationError> {
        if let Some(id) = self.find_template_snapshot(fingerprint) {
            return Ok(id);
        }
        let making = lock(&self.0.making)
            .entry(fingerprint.to_owned())
            .or_default()
            .clone();
        let _turn = making.lock().await;
        if let Some(id) = self.find_template_snapshot(fingerprint) {
            return Ok(id);
        }
        let failed = || OperationError::engine(format!("boot template `{template}`"));
        let engine = &self.0.engine;
        let persona = Persona {
            id: "template".to_owned(),
            ..Persona::default()
        };
        let arrival = engine.boot(template, size).await.map_err(failed())?;
        let guest = arrival.welcome(&persona).await.map_err(failed())?;
        let record = SnapshotRecord {
            id: new_id()?,
            name: None,
            purpose: Purpose::Template,
            sandbox: String::new(),
            template: template.to_owned(),
            fingerprint: fingerprint.to_owned(),
            size,
            parent: None,
            kept: true,
            stopped_ms: 0.0,
            total_ms: 0.0,
            created_ms: now_ms(),
        };
        let taken = self.take(&guest, record, AfterSnapshot::Stop, |_| Vec::new());
        let taken = taken.await;
        guest.stop().await;
        let snapshot = taken?;
        self.retire_older(&snapshot)?;
        Ok(snapshot.id)
    }

    /// Snapshots of the same template and size with another fingerprint serve no new sandbox.
    fn retire_older(&self, newest: &SnapshotRecord) -> Result<(), OperationError> {
        let mut older = Vec::new();
        for s in lock(&self.0.snapshots).values_mut() {
            let same = s.template == newest.template && s.size == newest.size;
            if s.purpose == Purpose::Template && same && s.id != newest.id && s.kept {
                s.kept = false;
                self.0.pool.drop_shelf(&s.fingerprint);
                older.push(Change::Snapshot(s.clone()));
            }
        }
        self.0.journal.commit(&older)?;
        self.collect()
    }
}
