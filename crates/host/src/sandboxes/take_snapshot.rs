//! `snapshot`: a sandbox at one instant, while it runs on.

use super::entry::SandboxEntry;
use super::{OperationError, Sandboxes, Snapshots};
use crate::journal::JournalChange;
use crate::quota::{QuotaAmount, QuotaPermit, QuotaRequest};
use crate::records::{
    SandboxOperation, SandboxRecord, SandboxState, SnapshotPurpose, SnapshotRecord,
};
use jiffy_engine::{AfterSnapshot, Engine, EngineError, Guest, new_id, now_ms};

impl<E: Engine> Sandboxes<E> {
    /// Takes a snapshot of a sandbox, which runs on. One of a paused sandbox is what it sleeps in.
    pub async fn snapshot(
        &self,
        id: &str,
        name: Option<String>,
    ) -> Result<SnapshotRecord, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("snapshot", &entry.id(), async move {
            let _op_guard = entry.op_lock().lock().await;
            this.snapshot_for(&entry, SnapshotPurpose::Asked, name, "snapshot")
                .await
        })
        .await
    }

    /// Takes a snapshot of a running sandbox or finds that of a paused one. Needs the turn.
    pub(super) async fn snapshot_for(
        &self,
        entry: &SandboxEntry<E::Guest>,
        purpose: SnapshotPurpose,
        name: Option<String>,
        verb: &'static str,
    ) -> Result<SnapshotRecord, OperationError> {
        let operation = match purpose {
            SnapshotPurpose::Fork => SandboxOperation::Fork,
            _ => SandboxOperation::Snapshot,
        };
        let sandbox = entry.allow(operation, verb)?;
        if sandbox.state == SandboxState::Paused {
            return self.snapshot_of_sleeper(&sandbox, purpose, name).await;
        }
        let guest = entry.running(operation, verb)?;
        let record = self.snapshots().draft(&sandbox, purpose, name)?;
        let permit = self.budgets().reserve_snapshot(&record, &sandbox).await?;
        let _pin = self.snapshots().hold(&record.id);
        let snapshot = self
            .snapshots()
            .take(&guest, record, AfterSnapshot::Resume, &permit, |snapshot| {
                vec![JournalChange::Sandbox(descended(&sandbox, snapshot))]
            })
            .await?;
        entry.set_record(descended(&sandbox, &snapshot));
        self.snapshots().gc(sandbox.snapshot);
        Ok(snapshot)
    }

    async fn snapshot_of_sleeper(
        &self,
        sandbox: &SandboxRecord,
        purpose: SnapshotPurpose,
        name: Option<String>,
    ) -> Result<SnapshotRecord, OperationError> {
        let id = sandbox.snapshot.as_deref().unwrap_or_default();
        let owner = sandbox.settings.owner.as_deref();
        let (mut snapshot, _pin) = self.snapshots().pin_or_fetch(owner, id).await?;
        if purpose == SnapshotPurpose::Asked {
            // One that was asked for before is counted already.
            let counted = snapshot.purpose == SnapshotPurpose::Asked && snapshot.kept;
            let amount = QuotaAmount {
                snapshots: u64::from(!counted),
                ..QuotaAmount::default()
            };
            let request = QuotaRequest {
                amount,
                disk_floor: None,
            };
            let _permit = self
                .budgets()
                .reserve(snapshot.owner.as_deref(), request)
                .await?;
            let _order = self.0.snapshot_changes.lock();
            // Its parent may be another one by now.
            if let Some(current) = self.0.snapshot_index.lock().get(&snapshot.id) {
                snapshot = current.clone();
            }
            let before = snapshot.clone();
            snapshot.name = name.or(snapshot.name);
            snapshot.purpose = SnapshotPurpose::Asked;
            snapshot.kept = true;
            // A copy in a store says the same of it as this host.
            let copies = match snapshot == before {
                true => Vec::new(),
                false => snapshot.store.give_up(&before.id),
            };
            let changes = copies.iter().cloned().map(JournalChange::Retraction);
            let changes = [JournalChange::Snapshot(snapshot.clone())]
                .into_iter()
                .chain(changes);
            self.0.journal.commit(&changes.collect::<Vec<_>>())?;
            self.0.snapshot_index.lock().insert(snapshot.clone());
            self.0.upkeep.seal(&snapshot.id);
            self.0.uploads.retract(copies);
            self.snapshots().upload(&snapshot);
        }
        Ok(snapshot)
    }
}

impl<E: Engine> Snapshots<'_, E> {
    /// Changes what is known of a snapshot, in the journal and in memory; none: it is gone.
    pub(super) fn update(
        self,
        id: &str,
        change: impl FnOnce(&mut SnapshotRecord),
    ) -> Option<SnapshotRecord> {
        let _order = self.0.snapshot_changes.lock();
        let mut record = self.0.snapshot_index.lock().get(id).cloned()?;
        change(&mut record);
        self.0
            .journal
            .commit_write_behind(&[JournalChange::Snapshot(record.clone())]);
        self.0.snapshot_index.lock().insert(record.clone());
        Some(record)
    }

    /// A snapshot of `sandbox` to be.
    pub(super) fn draft(
        self,
        sandbox: &SandboxRecord,
        purpose: SnapshotPurpose,
        name: Option<String>,
    ) -> Result<SnapshotRecord, OperationError> {
        Ok(SnapshotRecord {
            id: new_id()?,
            name,
            purpose,
            sandbox: sandbox.id.clone(),
            owner: sandbox.settings.owner.clone(),
            env: sandbox.env.clone(),
            site: sandbox.settings.site.clone(),
            template: sandbox.template.clone(),
            fingerprint: String::new(),
            size: sandbox.size,
            engine: None,
            parent: sandbox.snapshot.clone(),
            kept: purpose == SnapshotPurpose::Asked,
            stopped_ms: 0.0,
            total_ms: 0.0,
            bytes: 0,
            created_ms: now_ms(),
            store: Default::default(),
        })
    }

    /// Has the engine write `draft`, no larger than `permit` says; `with` is committed together
    /// with its completion.
    pub(super) async fn take(
        self,
        guest: &E::Guest,
        draft: SnapshotRecord,
        then: AfterSnapshot,
        permit: &QuotaPermit,
        with: impl FnOnce(&SnapshotRecord) -> Vec<JournalChange>,
    ) -> Result<SnapshotRecord, OperationError> {
        // Until it has its record, nothing else says that its files are needed.
        let _pin = self.hold(&draft.id);
        self.0
            .journal
            .commit(&[JournalChange::Intent(draft.clone())])?;
        let (id, parent) = (&draft.id, draft.parent.as_deref());
        let most = permit.disk_bytes();
        let taken = self.0.engine.snapshot(guest, id, parent, then, most).await;
        let times = match taken {
            Ok(times) => times,
            Err(EngineError::SnapshotTooLarge { needed, most }) => {
                self.0
                    .journal
                    .commit_write_behind(&[JournalChange::NoSnapshot(id.clone())]);
                return Err(OperationError::DiskQuota { needed, left: most });
            }
            Err(e) => {
                self.0
                    .journal
                    .commit_write_behind(&[JournalChange::NoSnapshot(id.clone())]);
                let what = match draft.sandbox.as_str() {
                    "" => format!("snapshot template `{}`", draft.template),
                    sandbox => format!("snapshot sandbox {sandbox}"),
                };
                return Err(OperationError::engine(what)(e));
            }
        };
        let snapshot = SnapshotRecord {
            stopped_ms: times.stopped_us as f64 / 1000.0,
            total_ms: times.total_us as f64 / 1000.0,
            bytes: self.0.engine.snapshot_size(&draft.id).unwrap_or(0),
            engine: Some(guest.engine().to_owned()),
            ..draft
        };
        let mut changes = vec![JournalChange::Snapshot(snapshot.clone())];
        changes.extend(with(&snapshot));
        let order = self.0.snapshot_changes.lock();
        self.0.journal.commit_write_behind(&changes);
        self.0.snapshot_index.lock().insert(snapshot.clone());
        drop(order);
        if snapshot.kept {
            self.0.upkeep.seal(&snapshot.id);
        }
        self.upload(&snapshot);
        Ok(snapshot)
    }
}

/// The sandbox after `snapshot` was taken of it.
pub(super) fn descended(sandbox: &SandboxRecord, snapshot: &SnapshotRecord) -> SandboxRecord {
    SandboxRecord {
        snapshot: Some(snapshot.id.clone()),
        ..sandbox.clone()
    }
}
