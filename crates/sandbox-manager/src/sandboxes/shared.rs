//! Sandboxes that any host of a store can resume.
//!
//! The *head* of a sandbox is a record in the store that decides which host may run the sandbox
//! ([`jiffy_fleet::Heads`]). After a *claim*, no other host may run the sandbox. A
//! *tenant* is the part of a store that belongs to one owner. The *identity* of a sandbox consists
//! of id, host name, entropy and clock. A guest receives it before its sandbox can be used.
//!
//! This host publishes the head when the snapshot of a pause is stored, claims it before a resumed
//! guest receives its identity, and marks it when the sandbox is killed. Sandboxes whose pauses
//! were never stored have no head, and cause no request.
//!
//! The `op_lock` of a sandbox serialises the operations on it. All functions that change a sandbox
//! hold this lock: an upload that ends while the sandbox is resumed then sees that it is no longer
//! paused, and publishes nothing.

use super::entry::SandboxEntry;
use super::{OperationError, Sandboxes};
use crate::journal::JournalChange;
use crate::records::SandboxRecord;
use crate::sandbox::Sandbox;
use crate::store_copies::{StorePlace, StoreRetraction};
use jiffy_api_types::{SandboxState, SnapshotPurpose, StoreState};
use jiffy_engine_api::{is_id, steps};
use jiffy_fleet::{Claim, HeadError, MAX_SHARED_RECORD_BYTES, Publication};
use jiffy_fleet_core::{MemberId, Revision};
use jiffy_store::host::LOCAL_TENANT;
use std::sync::Arc;
use tokio::task::JoinHandle;

/// Claim that runs during the restore of a guest.
pub(super) struct PendingClaim(JoinHandle<Result<Option<Claim>, HeadError>>);

impl PendingClaim {
    /// Waits for the claim, and returns it with the revision of the head, or `None` if the sandbox
    /// has no head. The guest must not receive its identity before. If this value or the result is
    /// dropped, the sandbox is released.
    pub(super) async fn wait(self) -> Result<Option<(Claim, u64)>, OperationError> {
        let _step = steps::begin("claim");
        let claimed = self.0.await;
        let claimed = claimed.map_err(|e| OperationError::Lost(e.to_string()))?;
        let Some(mut claim) = claimed? else {
            return Ok(None);
        };
        // This host may have lost its authority to run the sandbox during the restore.
        let Revision(revision) = claim.confirm()?;
        Ok(Some((claim, revision)))
    }

    /// Waits for the claim, and releases the sandbox. Returns the error if another host has taken
    /// over the sandbox or killed it.
    pub(super) async fn moved(self) -> Option<OperationError> {
        let error = self.wait().await.err()?;
        matches!(&error, OperationError::Head(e) if e.is_moved()).then_some(error)
    }
}

impl Sandboxes {
    /// Starts the claim of a sandbox that is about to run again. `None` if no other host can know
    /// the sandbox. The caller must hold `op_lock`.
    pub(super) fn begin_claim(&self, entry: &SandboxEntry) -> Option<PendingClaim> {
        let heads = self.0.heads.clone().filter(|_| entry.may_be_stored())?;
        let (record, from_stored) = (entry.record(), entry.is_from_stored());
        Some(PendingClaim(tokio::spawn(async move {
            let owner = record.settings.owner.as_deref();
            let snapshot = record.snapshot.as_deref().unwrap_or_default();
            heads.claim(owner, &record.id, snapshot, from_stored).await
        })))
    }

    /// Publishes the pause whose snapshot `id` has reached the store. Does nothing if the sandbox
    /// is no longer paused in this snapshot.
    pub(super) async fn publish_pause(&self, id: &str) -> Result<(), OperationError> {
        let Some(heads) = self.0.heads.clone() else {
            return Ok(());
        };
        let Some(snapshot) = self.0.catalog.get(id) else {
            return Ok(());
        };
        let entry = self.0.entries.lock().get(&*snapshot.sandbox).cloned();
        let Some(entry) = entry.filter(|_| snapshot.purpose == SnapshotPurpose::Pause) else {
            return Ok(());
        };
        let _op_guard = entry.op_lock().lock().await;
        let record = entry.record();
        let is_paused = record.state == SandboxState::Paused;
        let place = self.place_of(&record);
        let root = snapshot.store.root(&place);
        let Some(root) = root.filter(|_| is_paused && record.snapshot.as_deref() == Some(id))
        else {
            return Ok(());
        };
        let text = serde_json::to_string(&SandboxRecord::from(&record));
        let text = text.map_err(|e| OperationError::Lost(e.to_string()))?;
        if text.len() > MAX_SHARED_RECORD_BYTES {
            // The snapshot stays in the store. Without a head, only this host can resume the
            // sandbox.
            tracing::warn!(
                id = record.id,
                bytes = text.len(),
                limit = MAX_SHARED_RECORD_BYTES,
                "a paused sandbox is not shared: its record is too large"
            );
            return Ok(());
        }
        // The entry is marked before the head exists, so that a later resume claims the head.
        entry.set_may_be_stored();
        let pause = Publication {
            sandbox: &record.id,
            snapshot: id,
            root,
            taken_ms: snapshot.created_ms,
            record: text,
        };
        let owner = record.settings.owner.as_deref();
        match heads.publish(owner, &pause).await {
            Err(e) if e.is_moved() => {
                self.forget_moved(&entry);
                Ok(())
            }
            other => {
                let Revision(revision) = other?;
                self.set_head(&entry, revision, Some(id));
                Ok(())
            }
        }
    }

    /// Publishes the stored pauses of an earlier daemon that may not have been published. If that
    /// daemon claimed a sandbox without starting it, this also releases the sandbox: its head
    /// becomes paused again.
    pub(super) fn publish_earlier_pauses(&self) {
        if self.0.heads.is_none() {
            return;
        }
        let weak = self.downgrade();
        let paused = self.list().into_iter();
        let paused = paused.filter(|sandbox| sandbox.state == SandboxState::Paused);
        let snapshots: Vec<String> = paused.filter_map(|sandbox| sandbox.snapshot).collect();
        tokio::spawn(async move {
            for id in snapshots {
                let Some(this) = weak.upgrade() else {
                    return;
                };
                if let Err(e) = this.publish_pause(&id).await {
                    tracing::warn!(id, error = %e, "cannot publish a stored pause");
                }
            }
        });
    }

    /// Returns the sandbox `id` of `owner` as another host stored it, in the state paused. `None`
    /// if the store does not know the sandbox.
    ///
    /// # Errors
    /// [`OperationError::Head`] if the sandbox runs on another host, or was killed.
    pub async fn stored_sandbox(
        &self,
        owner: Option<&str>,
        id: &str,
    ) -> Result<Option<Sandbox>, OperationError> {
        self.stored_or_older(owner, id, false).await
    }

    /// Like [`Self::stored_sandbox`]. With `or_older`, also returns the newest stored state of a
    /// sandbox whose host is dead and may have a newer state.
    ///
    /// # Errors
    /// As [`Self::stored_sandbox`].
    pub async fn stored_or_older(
        &self,
        owner: Option<&str>,
        id: &str,
        or_older: bool,
    ) -> Result<Option<Sandbox>, OperationError> {
        let Some(heads) = self.0.heads.clone().filter(|_| is_id(id)) else {
            return Ok(None);
        };
        let Some(stored) = heads.stored_or_older(owner, id, or_older).await? else {
            return Ok(None);
        };
        let damaged = |reason: String| HeadError::Damaged {
            sandbox: id.to_owned(),
            reason,
        };
        let parsed = serde_json::from_str::<SandboxRecord>(&stored.record);
        let record = parsed.map_err(|e| damaged(e.to_string()))?;
        let record = Box::<Sandbox>::try_from(record).map_err(|e| damaged(e.to_owned()))?;
        record.size.check()?;
        let is_own = record.id == id && record.settings.owner.as_deref() == owner;
        if !is_own || !is_id(&stored.snapshot) {
            return Err(damaged("its record belongs to another sandbox".to_owned()).into());
        }
        Ok(Some(Sandbox {
            state: SandboxState::Paused,
            snapshot: Some(stored.snapshot),
            deadline_ms: None,
            ..*record
        }))
    }

    /// Returns whether sandboxes that other hosts stored can be resumed here.
    pub fn shares_sandboxes(&self) -> bool {
        self.0.heads.is_some()
    }

    /// Kills a sandbox whose host `home` is dead: marks its head as killed, and removes its stored
    /// state. `home` is `None` if no host has files of the sandbox.
    ///
    /// # Errors
    /// [`OperationError::Head`] if the sandbox runs on another host, or the head cannot be written.
    pub async fn kill_away(
        &self,
        owner: Option<&str>,
        id: &str,
        home: Option<MemberId>,
    ) -> Result<(), OperationError> {
        let heads = self.0.heads.clone().ok_or(OperationError::NoStore)?;
        let unneeded = heads.kill_away(owner, id, home).await?;
        // The host of the sandbox may never return, so this host removes the state. If the former
        // host returns, it removes the state again, which has no effect.
        if let Some(state) = unneeded {
            let place = self.place_of_owner(owner);
            let root = Some(state.root.as_str());
            // `content` is true: the content is removed too, and not only the name.
            let removal = StoreRetraction::new(&place, &state.snapshot, root, true);
            self.retract_copies(vec![removal]);
        }
        Ok(())
    }

    /// Registers a sandbox that [`Self::stored_sandbox`] returned, so that the caller can resume it
    /// here. If the resume fails, `end_adoption` removes the sandbox again. Does nothing if this
    /// host has the sandbox.
    pub fn adopt_stored(&self, record: &Sandbox) {
        self.register_stored(record, false);
    }

    /// Like [`Self::adopt_stored`], for a state that may be older than the last state on the dead
    /// host of the sandbox.
    pub fn adopt_older(&self, record: &Sandbox) {
        self.register_stored(record, true);
    }

    /// Registers a sandbox that another host has stored, before its first resume on this host.
    /// `from_stored` permits a stored state that is older than the last state on the lost host.
    fn register_stored(&self, record: &Sandbox, from_stored: bool) {
        let (mut record, id) = (record.clone(), record.id.clone());
        // The lock is held until the entry is registered: a second entry would remove the first
        // from the indexes when it is dropped.
        let _adopting = self.0.adopting.lock();
        if self.0.heads.is_none() || self.find(&id).is_some() {
            return;
        }
        if let Some(name) = record.name.take() {
            let names = &self.0.indexes.names;
            match names.claim(&record.settings.owner, &name, &id) {
                Ok(()) => record.name = Some(name),
                Err(e) => tracing::warn!(id, error = %e, "resuming a sandbox without its name"),
            }
        }
        // All members of a private network are on one host. Another member may remain on the former
        // host.
        let network = &mut record.settings.network;
        if let Some(name) = network.join.take() {
            network.address = None;
            tracing::warn!(
                id,
                network = name,
                "resuming a sandbox without its private network"
            );
        }
        let entry = SandboxEntry::new(record, self.0.indexes.clone());
        entry.set_may_be_stored();
        entry.set_adopted(true);
        entry.set_from_stored(from_stored);
        self.0
            .entries
            .lock()
            .insert(entry.shared_id().clone(), Arc::new(entry));
    }

    /// Completes the resume of a sandbox that [`Self::adopt_stored`] registered: the sandbox
    /// becomes one of this host, or is forgotten if the resume failed. The caller must hold
    /// `op_lock`.
    pub(super) fn end_adoption(
        &self,
        entry: &SandboxEntry,
        resumed: &Result<Sandbox, OperationError>,
    ) {
        if !entry.is_adopted() {
            return;
        }
        match resumed {
            Ok(record) => {
                entry.set_adopted(false);
                entry.set_from_stored(false);
                // `true`: from now on, this host is responsible for the removal of the copies in
                // the store.
                let snapshot = record.snapshot.as_deref().unwrap_or_default();
                self.snapshots().set_copies_adopted(snapshot, true);
            }
            Err(_) => {
                let snapshot = entry.record().snapshot;
                self.0.entries.lock().remove(entry.shared_id());
                self.0.gc.collect(snapshot);
            }
        }
    }

    /// Removes a sandbox from this host that another host has taken over. Its copies in the store
    /// remain. The caller must hold `op_lock`.
    pub(super) fn forget_moved(&self, entry: &SandboxEntry) {
        let record = entry.record();
        tracing::info!(
            id = record.id,
            "removed a sandbox that another host took over"
        );
        let snapshot = record.snapshot.as_deref().unwrap_or_default();
        self.snapshots().set_copies_adopted(snapshot, false);
        let change = JournalChange::NoSandbox(record.id.clone());
        self.0.journal.commit_write_behind(&[change]);
        self.0.entries.lock().remove(entry.shared_id());
        self.0.gc.collect(record.snapshot);
    }

    /// Removes a paused sandbox from this host that any host can resume from the store. Returns
    /// false if the sandbox is not paused in a stored snapshot: it stays.
    pub async fn give_up(&self, id: &str) -> bool {
        let entry = self.0.entries.lock().get(id).cloned();
        let Some(entry) = entry.filter(|entry| !entry.is_adopted()) else {
            return false;
        };
        let _op_guard = entry.op_lock().lock().await;
        let record = entry.record();
        let snapshot = record.snapshot.as_deref().unwrap_or_default();
        let is_stored = self.snapshots().store_state_of(snapshot) == Some(StoreState::Stored);
        let is_ready = record.state == SandboxState::Paused && is_stored;
        if is_ready && entry.may_be_stored() && entry.head_revision().is_some() {
            self.forget_moved(&entry);
            return true;
        }
        false
    }

    /// Requests that the head of a killed sandbox be marked. The journal contains the request,
    /// which is repeated in the background until it succeeds, also after a restart. A host that
    /// shared its sandboxes before, and does not now, executes the request when it shares them
    /// again.
    pub(super) fn mark_killed(&self, entry: &SandboxEntry, record: &Sandbox) {
        if !entry.may_be_stored() {
            return;
        }
        let killed = if self.0.heads.is_some() {
            vec![StoreRetraction::of_head(&self.place_of(record), &record.id)]
        } else if self.0.has_shared {
            // This host shares no sandboxes now, and may use another store than before. The heads
            // are in the stores that have copies of the snapshot.
            let tenant = self.place_of(record).tenant;
            let snapshot = record.snapshot.as_deref();
            let snapshot = snapshot.and_then(|id| self.0.catalog.get(id));
            let copies = snapshot.iter().flat_map(|snapshot| &snapshot.store.copies);
            let own = copies.filter(|copy| copy.place.tenant == tenant);
            own.map(|copy| StoreRetraction::of_head(&copy.place, &record.id))
                .collect()
        } else {
            Vec::new()
        };
        self.retract_copies(killed);
    }

    /// Check before a kill: fails if a paused sandbox has moved to another host, and removes the
    /// sandbox from this host then.
    pub(super) async fn expect_not_moved(
        &self,
        entry: &SandboxEntry,
    ) -> Result<(), OperationError> {
        let Some(heads) = self.0.heads.clone().filter(|_| entry.may_be_stored()) else {
            return Ok(());
        };
        // A kill does not wait for an operation in flight, which holds the lock.
        let Ok(_op_guard) = entry.op_lock().try_lock() else {
            return Ok(());
        };
        let record = entry.record();
        if record.state != SandboxState::Paused {
            return Ok(());
        }
        let stored = heads.stored(record.settings.owner.as_deref(), &record.id);
        match stored.await {
            Err(e) if e.is_moved() => {
                self.forget_moved(entry);
                Err(e.into())
            }
            // Without the store the sandbox is killed here, and its head is marked later.
            _ => Ok(()),
        }
    }

    /// Returns the store and the tenant of the sandbox's snapshots and head. The store is an empty
    /// text if this host has none.
    pub(super) fn place_of(&self, record: &Sandbox) -> StorePlace {
        self.place_of_owner(record.settings.owner.as_deref())
    }

    /// Store and tenant of an owner's snapshots.
    fn place_of_owner(&self, owner: Option<&str>) -> StorePlace {
        let remote = self.0.uploads.remote.as_ref();
        StorePlace {
            store: remote
                .map(|remote| remote.url().to_owned())
                .unwrap_or_default(),
            tenant: owner.unwrap_or(LOCAL_TENANT).to_owned(),
        }
    }
}
