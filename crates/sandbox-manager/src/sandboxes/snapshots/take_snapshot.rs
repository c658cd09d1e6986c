//! `snapshot`: a sandbox at one instant, while it runs on.

use crate::journal::JournalChange;
use crate::quota::{DiskLimit, QuotaAmount, QuotaPermit, QuotaRequest};
use crate::sandbox::{Sandbox, SandboxOperation};
use crate::sandboxes::entry::SandboxEntry;
use crate::sandboxes::snapshots::capture::Acknowledgement;
use crate::sandboxes::{OperationError, Sandboxes, Snapshots};
use crate::snapshot::Snapshot;
use futures_util::future::OptionFuture;
use jiffy_api_types::{SandboxState, SnapshotPurpose};
use jiffy_engine_api::{AfterSnapshot, EngineError, Guest, SnapshotTimes, new_id, now_ms, steps};
use tokio::sync::oneshot;

impl Sandboxes {
    /// Takes a snapshot of a sandbox, which runs on. One of a paused sandbox is what it sleeps in.
    pub async fn snapshot(
        &self,
        id: &str,
        name: Option<String>,
    ) -> Result<Snapshot, OperationError> {
        self.take_snapshot(id, name, None).await
    }

    /// The same, but returns once the memory is frozen, where the engine does that, and the
    /// snapshot is stored behind it. It is lost if the process that holds its memory, or the host,
    /// ends before it is stored.
    pub async fn capture(
        &self,
        id: &str,
        name: Option<String>,
    ) -> Result<Snapshot, OperationError> {
        let (acknowledgement, captured) = oneshot::channel();
        tokio::select! {
            biased;
            taken = self.take_snapshot(id, name, Some(acknowledgement)) => taken,
            // The snapshot that is under way is completed.
            Ok(captured) = captured => Ok(captured),
        }
    }

    async fn take_snapshot(
        &self,
        id: &str,
        name: Option<String>,
        acknowledgement: Option<Acknowledgement>,
    ) -> Result<Snapshot, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("snapshot", &entry.id(), async move {
            let _op_guard = entry.op_lock().lock().await;
            let purpose = SnapshotPurpose::Asked;
            this.snapshot_for(&entry, purpose, name, "snapshot", acknowledgement)
                .await
        })
        .await
    }

    /// Takes a snapshot of a running sandbox or finds that of a paused one. Needs the turn.
    pub(in crate::sandboxes) async fn snapshot_for(
        &self,
        entry: &SandboxEntry,
        purpose: SnapshotPurpose,
        name: Option<String>,
        verb: &'static str,
        acknowledgement: Option<Acknowledgement>,
    ) -> Result<Snapshot, OperationError> {
        let operation = match purpose {
            SnapshotPurpose::Fork => SandboxOperation::Fork,
            _ => SandboxOperation::Snapshot,
        };
        let sandbox = entry.allow(operation, verb)?;
        if sandbox.state == SandboxState::Paused {
            return self.snapshot_of_sleeper(&sandbox, purpose, name).await;
        }
        let guest = entry.running(operation, verb)?;
        let record = self.snapshots().draft(&sandbox, &*guest, purpose, name)?;
        let permit = self.budgets().reserve_snapshot(&record, &sandbox).await?;
        let _pin = self.0.catalog.pin(&record.id);
        let snapshot = self
            .snapshots()
            .take_acknowledged(
                &*guest,
                record,
                AfterSnapshot::Resume,
                &permit,
                acknowledgement,
                |snapshot| vec![JournalChange::Sandbox(descended(entry, snapshot))],
            )
            .await?;
        entry.set_record(descended(entry, &snapshot));
        self.0.gc.collect(sandbox.snapshot);
        Ok(snapshot)
    }

    async fn snapshot_of_sleeper(
        &self,
        sandbox: &Sandbox,
        purpose: SnapshotPurpose,
        name: Option<String>,
    ) -> Result<Snapshot, OperationError> {
        let id = sandbox.snapshot.as_deref().unwrap_or_default();
        let owner = sandbox.settings.owner.as_deref();
        let (mut snapshot, _pin) = self.snapshots().pin_or_fetch(owner, id).await?;
        if purpose == SnapshotPurpose::Asked {
            // One that was asked for before is counted already.
            let amount = QuotaAmount {
                snapshots: u64::from(!snapshot.is_asked_for()),
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
            let change = self.0.catalog.change();
            // Its parent may be another one by now.
            if let Some(current) = self.0.catalog.get(&snapshot.id) {
                snapshot = current;
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
            let retractions = copies.iter().cloned().map(JournalChange::Retraction);
            change.commit(snapshot.clone(), retractions.collect())?;
            drop(change);
            self.0.upkeep.enqueue_checksums(&snapshot.id);
            self.0.uploads.retract(copies);
            self.snapshots().upload(&snapshot);
        }
        Ok(snapshot)
    }
}

impl Snapshots<'_> {
    /// Returns the record of a new snapshot of `sandbox`, which runs as `guest`.
    pub(in crate::sandboxes) fn draft(
        self,
        sandbox: &Sandbox,
        guest: &dyn Guest,
        purpose: SnapshotPurpose,
        name: Option<String>,
    ) -> Result<Snapshot, OperationError> {
        Ok(Snapshot {
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
            engine: guest.engine().to_owned(),
            parent: sandbox.snapshot.clone(),
            kept: purpose == SnapshotPurpose::Asked,
            stopped_ms: 0.0,
            total_ms: 0.0,
            bytes: 0,
            created_ms: now_ms(),
            storing: false,
            store: Default::default(),
        })
    }

    /// Has the engine write `draft`, no larger than `permit` says; `with` is committed together
    /// with its completion.
    pub(in crate::sandboxes) async fn take(
        self,
        guest: &dyn Guest,
        draft: Snapshot,
        then: AfterSnapshot,
        permit: &QuotaPermit,
        with: impl FnOnce(&Snapshot) -> Vec<JournalChange>,
    ) -> Result<Snapshot, OperationError> {
        self.take_acknowledged(guest, draft, then, permit, None, with)
            .await
    }

    /// The same; `acknowledgement` is told once it is captured, where the engine does that.
    pub(in crate::sandboxes) async fn take_acknowledged(
        self,
        guest: &dyn Guest,
        draft: Snapshot,
        then: AfterSnapshot,
        permit: &QuotaPermit,
        acknowledgement: Option<Acknowledgement>,
        with: impl FnOnce(&Snapshot) -> Vec<JournalChange>,
    ) -> Result<Snapshot, OperationError> {
        // Until it has its record, nothing else says that its files are needed.
        let _pin = self.0.catalog.pin(&draft.id);
        let mut step = steps::begin("journal");
        self.0
            .journal
            .commit(&[JournalChange::Intent(draft.clone())])?;
        step.next("snapshot");
        let (id, parent) = (&draft.id, draft.parent.as_deref());
        let most = permit.disk_bytes();
        let (notice, acknowledging) = acknowledgement
            .map(|acknowledgement| {
                let (notice, frozen) = oneshot::channel();
                (notice, self.acknowledge(&draft, frozen, acknowledgement))
            })
            .unzip();
        let taking = guest.take_snapshot(id, parent, then, most, notice);
        let acknowledging = OptionFuture::from(acknowledging);
        let (taken, storing) = tokio::join!(taking, acknowledging);
        drop(step);
        // Waiters for the snapshot go on when this returns.
        let storing = storing.flatten();
        let failure = match taken {
            Ok(times) => return Ok(self.complete(guest, draft, times, with)),
            Err(EngineError::SnapshotTooLarge { needed, most: left }) => {
                match permit.disk_limit() {
                    DiskLimit::Key => OperationError::DiskQuota { needed, left },
                    DiskLimit::Host => OperationError::HostDisk { needed, left },
                }
            }
            Err(e) => {
                let what = match draft.sandbox.as_str() {
                    "" => format!("snapshot template `{}`", draft.template),
                    sandbox => format!("snapshot sandbox {sandbox}"),
                };
                OperationError::engine(what)(e)
            }
        };
        match storing {
            Some(_) => self.lose(&draft, &failure.to_string()),
            None => {
                let removal = JournalChange::NoSnapshot(draft.id.clone());
                self.0.journal.commit_write_behind(&[removal]);
            }
        }
        Err(failure)
    }

    /// Writes down that the engine has written `draft`, together with `with`.
    pub(in crate::sandboxes) fn complete(
        self,
        guest: &dyn Guest,
        draft: Snapshot,
        times: SnapshotTimes,
        with: impl FnOnce(&Snapshot) -> Vec<JournalChange>,
    ) -> Snapshot {
        let mut snapshot = Snapshot {
            storing: false,
            stopped_ms: times.stopped_us as f64 / 1000.0,
            total_ms: times.total_us as f64 / 1000.0,
            engine: guest.engine().to_owned(),
            ..draft
        };
        let files = self.0.engines.snapshot_files(&snapshot.engine);
        let size = files.ok().and_then(|files| files.size(&snapshot.id));
        snapshot.bytes = size.unwrap_or(0);
        let more = with(&snapshot);
        let _step = steps::begin("journal");
        let change = self.0.catalog.change();
        change.commit_write_behind(snapshot.clone(), more);
        drop(change);
        if snapshot.kept {
            self.0.upkeep.enqueue_checksums(&snapshot.id);
        }
        self.upload(&snapshot);
        snapshot
    }
}

/// The sandbox after `snapshot` was taken of it. One that is being killed is killed.
pub(in crate::sandboxes) fn descended(entry: &SandboxEntry, snapshot: &Snapshot) -> Sandbox {
    let record = match entry.is_ending() {
        true => entry.record_in(SandboxState::Killed),
        false => entry.record(),
    };
    Sandbox {
        snapshot: Some(snapshot.id.clone()),
        ..record
    }
}
