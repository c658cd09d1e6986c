//! Uploads snapshots to the store that hosts share, and removes copies from it, in the background.
//! A *tenant* is the part of the store that belongs to one owner. The shared tenant has snapshots
//! of stock templates, which all owners may read.
//!
//! Snapshots requested by clients and snapshots of paused sandboxes are uploaded together with
//! their ancestors. The journal records each complete copy, so that a daemon continues after a
//! crash. It also records each copy to remove, so that the copy is removed even if the store is
//! unreachable at first.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox.

mod push;
mod queue;
mod readers;

pub(in crate::sandboxes) use queue::Uploads;

use crate::journal::JournalChange;
use crate::metrics::CurrentFigures;
use crate::sandboxes::{OperationError, Sandboxes, SandboxesInner, Snapshots};
use crate::snapshot::Snapshot;
use crate::store_copies::{StorePlace, StoreRetraction};
use jiffy_api_types::{SandboxState, SnapshotPurpose, StoreState};
use jiffy_store::SHARED_TENANT;
use jiffy_store::host::{LOCAL_TENANT, RemoteStore};
use push::UploadError;
use queue::{UploadEnd, retry_delay};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Maximum time between two checks of a queue.
const IDLE_TIME: Duration = Duration::from_secs(3600);

/// Returns whether other hosts can find the snapshot in the store by its id. Other snapshots are
/// uploaded only as ancestors.
fn is_named(record: &Snapshot) -> bool {
    match record.purpose {
        SnapshotPurpose::Requested => record.retained,
        SnapshotPurpose::Pause => true,
        SnapshotPurpose::Template | SnapshotPurpose::Fork | SnapshotPurpose::Step => false,
    }
}

impl Sandboxes {
    /// Queues the snapshots that an earlier daemon did not upload, and starts the background tasks.
    pub(in crate::sandboxes) fn start_uploads(&self) {
        let Some(remote) = self.0.uploads.remote.clone() else {
            return;
        };
        let paused = self.list().into_iter();
        let paused = paused.filter(|sandbox| sandbox.state == SandboxState::Paused);
        let paused = paused.filter_map(|sandbox| sandbox.snapshot);
        let retained = self.snapshots().ids_of(|snapshot| snapshot.retained);
        for id in paused.chain(retained) {
            if let Some(record) = self.0.catalog.get(&id) {
                self.snapshots().upload(&record);
            }
        }
        let wake = self.0.uploads.wake.clone();
        let serving = serve(Arc::downgrade(&self.0), remote.clone(), wake);
        tokio::spawn(serving);
        let wake = self.0.uploads.wake_readers.clone();
        let reporting = readers::report_needs(Arc::downgrade(&self.0), remote.clone(), wake);
        tokio::spawn(reporting);
        let wake = self.0.uploads.wake_retractions.clone();
        tokio::spawn(retract(Arc::downgrade(&self.0), remote, wake));
    }

    /// Adds the metrics of uploads.
    pub(in crate::sandboxes) fn upload_figures(&self, now: &mut CurrentFigures) {
        let uploads = &self.0.uploads;
        let Some(remote) = &uploads.remote else {
            return;
        };
        let (waiting, running) = uploads.counts();
        let states = [("waiting", waiting as f64), ("running", running as f64)];
        let help = "Snapshots that are not uploaded yet";
        now.add_each("store_uploads_pending", help, "state", states);
        let help = "Copies in the store that are not removed yet";
        now.add("store_removals_pending", help, uploads.retractions() as f64);
        // Each counter is independent, so the order of the reads does not matter.
        let of = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &uploads.counters;
        let outcomes = [
            ("ok", of(&counters.uploads)),
            ("failed", of(&counters.failures)),
        ];
        let help = "Completed and failed uploads; failed uploads are retried";
        now.count_each("store_uploads", help, "outcome", outcomes);
        let outcomes = [
            ("ok", of(&counters.repaired)),
            ("failed", of(&counters.failed_repairs)),
        ];
        let help = "Repairs of damaged snapshots of this host";
        now.count_each("store_mended_snapshots", help, "outcome", outcomes);
        let (chunks, sent) = (of(&counters.chunks), of(&counters.new_chunks));
        let chunks = [("sent", sent), ("known", chunks.saturating_sub(sent))];
        let help = "Chunks of uploaded snapshots: sent, or already in the store";
        now.count_each("store_chunks", help, "what", chunks);
        let traffic = remote.traffic();
        let requests = [
            ("get", traffic.gets),
            ("put", traffic.puts),
            ("head", traffic.heads),
            ("list", traffic.lists),
            ("delete", traffic.deletes),
        ];
        now.count_each("store_requests", "Requests to the store", "kind", requests);
        let bytes = [
            ("read", traffic.bytes_read),
            ("written", traffic.bytes_written),
        ];
        let help = "Bytes read from the store and written to it";
        now.count_each("store_bytes", help, "direction", bytes);
        let help = "Retried requests to the store";
        now.count_each("store_retries", help, "kind", [("any", traffic.retries)]);
        let mut states = StoreState::ALL.map(|state| (state.name(), 0.0));
        let snapshots = self.0.catalog.read();
        for record in snapshots.values() {
            let state = self.snapshots().store_state(record);
            if let Some(at) = StoreState::ALL.iter().position(|s| Some(*s) == state) {
                states[at].1 += 1.0;
            }
        }
        drop(snapshots);
        let help = "Snapshots of this host by their state in the store";
        now.add_each("store_snapshots", help, "state", states);
    }
}

/// Starts due uploads until the sandboxes are dropped.
async fn serve(
    inner: Weak<SandboxesInner>,
    remote: Arc<RemoteStore>,
    wake: Arc<tokio::sync::Notify>,
) {
    loop {
        let Some(this) = inner.upgrade().map(Sandboxes) else {
            return;
        };
        let (due, next) = this.0.uploads.begin_due();
        for (id, cancelled) in due {
            let (this, remote) = (this.clone(), remote.clone());
            tokio::spawn(async move {
                let uploaded = match this.upload(&remote, &id, &cancelled).await {
                    // The manifest is stored: other hosts may know the pause now.
                    Ok(()) => this.publish_pause(&id).await.map_err(UploadError::from),
                    failed => failed,
                };
                let end = match uploaded {
                    Ok(()) => {
                        let counters = &this.0.uploads.counters;
                        counters.uploads.fetch_add(1, Ordering::Relaxed);
                        UploadEnd::Stored
                    }
                    Err(UploadError::Removed) => UploadEnd::Dropped,
                    Err(e) => {
                        tracing::warn!(id, error = %e, "cannot upload a snapshot to the store");
                        UploadEnd::Failed(e.to_string())
                    }
                };
                this.0.uploads.end(&id, end);
            });
        }
        // `this` is dropped before the task waits, so that the task does not keep the sandboxes
        // alive.
        drop(this);
        let now = Instant::now();
        let wait = next.map_or(IDLE_TIME, |next| next.saturating_duration_since(now));
        // The queue is checked again after a notification and after the timeout.
        let _ = tokio::time::timeout(wait, wake.notified()).await;
    }
}

/// Removes copies from the store, one at a time.
async fn retract(
    inner: Weak<SandboxesInner>,
    remote: Arc<RemoteStore>,
    wake: Arc<tokio::sync::Notify>,
) {
    let mut failures = 0;
    loop {
        let Some(this) = inner.upgrade().map(Sandboxes) else {
            return;
        };
        let next = this
            .0
            .uploads
            .next_retraction(remote.url(), this.0.heads.is_some());
        drop(this);
        let wait = match next {
            None => IDLE_TIME,
            Some(copy) => {
                let root = copy.root.as_deref();
                let removed = if copy.head {
                    kill_head(&inner, &copy).await
                } else {
                    let removal = remote.retract(&copy.tenant, &copy.id, root, copy.content);
                    removal.await.map_err(OperationError::retraction)
                };
                let Some(this) = inner.upgrade().map(Sandboxes) else {
                    return;
                };
                match removed {
                    // The end is recorded after the removal from the store: after a crash in
                    // between, the removal is repeated, which is harmless.
                    Ok(()) => {
                        failures = 0;
                        this.0.uploads.end_retraction(&copy);
                        let changes = [JournalChange::Retracted(copy)];
                        this.0.journal.commit_write_behind(&changes);
                        continue;
                    }
                    Err(e) => {
                        let id = &copy.id;
                        tracing::warn!(id, error = %e, "cannot remove a snapshot from the store, retrying");
                        // The same removal is retried after the delay.
                        let delay = retry_delay(failures);
                        failures += 1;
                        delay
                    }
                }
            }
        };
        let _ = tokio::time::timeout(wait, wake.notified()).await;
    }
}

/// Marks the head of a killed sandbox.
async fn kill_head(
    inner: &Weak<SandboxesInner>,
    copy: &StoreRetraction,
) -> Result<(), OperationError> {
    let heads = inner.upgrade().and_then(|inner| inner.heads.clone());
    let owner = Some(copy.tenant.as_str());
    match heads {
        Some(heads) => Ok(heads.kill(owner, &copy.id).await?),
        // During a shutdown, the caller ignores this result. Without heads, no such change is
        // selected.
        None => Ok(()),
    }
}

impl Snapshots<'_> {
    /// Returns the place of a snapshot's copy in the store. `None` if there is no store.
    fn place(self, record: &Snapshot) -> Option<StorePlace> {
        let remote = self.0.uploads.remote.as_ref()?;
        let tenant = if self.0.uploads.is_shared(record) {
            SHARED_TENANT
        } else {
            record.owner.as_deref().unwrap_or(LOCAL_TENANT)
        };
        Some(StorePlace {
            store: remote.url().to_owned(),
            tenant: tenant.to_owned(),
        })
    }

    /// Returns the state of a snapshot in the shared store. `None` if there is no store.
    pub fn store_state(self, record: &Snapshot) -> Option<StoreState> {
        let place = self.place(record)?;
        let is_queued = self.0.uploads.is_queued(&record.id);
        let is_stored = record.store.root(&place).is_some();
        // With heads, a pause counts as stored only when its head is written.
        Some(if is_stored && !(is_queued && self.0.heads.is_some()) {
            StoreState::Stored
        } else if is_queued {
            StoreState::Uploading
        } else {
            StoreState::Local
        })
    }

    /// Returns the state in the store of the snapshot with this complete id. `None` if there is no
    /// store or no such snapshot.
    pub fn store_state_of(self, id: &str) -> Option<StoreState> {
        self.0.uploads.remote.as_ref()?;
        self.store_state(&self.0.catalog.get(id)?)
    }

    /// Queues the upload of a snapshot if other hosts may need it and it is not in the store.
    pub(in crate::sandboxes) fn upload(self, record: &Snapshot) {
        // Other snapshots are uploaded only as ancestors.
        if is_named(record) && self.store_state(record) == Some(StoreState::Local) {
            self.0.uploads.enqueue(&record.id, record.owner.as_deref());
        }
    }

    /// Cancels the upload of a snapshot that a client removed. If other snapshots or sandboxes
    /// still need the content, only the id is removed from the store, so that no host finds the
    /// snapshot by it.
    pub(in crate::sandboxes) fn withdraw(self, id: &str) {
        self.0.uploads.cancel(id);
        let Some(record) = self.0.catalog.get(id).filter(|record| !is_named(record)) else {
            return;
        };
        // `content` is false: only the names are removed.
        let names = record.store.retractions(id, false).collect();
        Sandboxes(self.0.clone()).retract_copies(names);
    }

    /// Cancels the upload of the snapshot of a paused sandbox if it has no other user.
    pub(in crate::sandboxes) fn cancel_unused(self, id: &str) {
        let used = {
            let snapshots = self.0.catalog.read();
            let pause = |s: &Snapshot| s.purpose == SnapshotPurpose::Pause;
            !snapshots.get(id).is_some_and(pause)
                || snapshots.children(id).next().is_some()
                || self.0.indexes.users.has_any(id)
        };
        if !used {
            self.0.uploads.cancel(id);
        }
    }

    /// Changes which host later removes the copies of a pause in the store: this host if `adopted`,
    /// otherwise the host to which the sandbox moved. Concerns snapshot `id` and the earlier pauses
    /// on which it is based. The head of the sandbox must already record the move.
    pub fn set_copies_adopted(self, id: &str, adopted: bool) {
        let mut next = Some(id.to_owned());
        while let Some(id) = next {
            let Some(record) = self.0.catalog.get(&id) else {
                return;
            };
            if record.purpose == SnapshotPurpose::Pause {
                self.0.catalog.update(&id, |now| {
                    now.store.set_adopted(adopted);
                });
            }
            next = record.parent;
        }
    }

    /// Fails if this host has no store.
    pub fn expect_store(self) -> Result<(), OperationError> {
        match self.0.uploads.remote {
            Some(_) => Ok(()),
            None => Err(OperationError::NoStore),
        }
    }

    /// Waits until snapshot `id` is in the store. Fails after a failed attempt; the upload is
    /// nevertheless retried.
    pub async fn wait_stored(self, id: &str) -> Result<Snapshot, OperationError> {
        self.expect_store()?;
        let uploads = &self.0.uploads;
        // This call subscribes before the state is read, so that no end is missed.
        let mut ended = uploads.ended.subscribe();
        // Failures before this call do not count.
        let (before, _) = uploads.failure(id);
        let mut has_enqueued = false;
        loop {
            ended.mark_unchanged();
            let record = self
                .0
                .catalog
                .get(id)
                .ok_or_else(|| OperationError::Unknown {
                    what: "snapshot",
                    id: id.to_owned(),
                    list: "jiffy snapshots",
                })?;
            let (failures, error) = uploads.failure(id);
            match self.store_state(&record) {
                Some(StoreState::Stored) => return Ok(record),
                Some(StoreState::Uploading) if failures > before => {
                    return Err(OperationError::NotStored {
                        id: id.to_owned(),
                        reason: error.unwrap_or_default(),
                    });
                }
                // Another request cancelled the upload that this call queued.
                _ if has_enqueued && !uploads.is_queued(id) => {
                    return Err(OperationError::NotStored {
                        id: id.to_owned(),
                        reason: "its upload was cancelled".to_owned(),
                    });
                }
                _ => uploads.enqueue(id, record.owner.as_deref()),
            }
            has_enqueued = true;
            // Ignore the result: the sender exists as long as the sandboxes.
            let _ = ended.changed().await;
        }
    }
}
