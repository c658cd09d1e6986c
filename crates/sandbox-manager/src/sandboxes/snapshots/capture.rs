//! Captured snapshots: they are acknowledged when their memory is frozen, and stored in the
//! background.
//!
//! The record of a *captured* snapshot is `storing` until its files are complete. Operations that
//! need the files wait for them. If the daemon exits meanwhile, the process that holds the memory
//! and the next daemon complete the snapshot. A *draft* is a snapshot that its engine has not
//! published yet.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

use crate::journal::JournalChange;
use crate::sandboxes::entry::SandboxEntry;
use crate::sandboxes::take_snapshot::record_after_snapshot;
use crate::sandboxes::{FetchScope, OperationError, Sandboxes, SandboxesInner, Snapshots};
use crate::snapshot::Snapshot;
use jiffy_engine_api::Guest;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tokio::sync::{oneshot, watch};

/// Maximum number of lost snapshots whose reason is retained.
const MAX_LOST: usize = 1000;

/// Sends the record to the client's call of `capture` when the snapshot is captured.
pub(in crate::sandboxes) type Acknowledgement = oneshot::Sender<Snapshot>;

/// Captured snapshots that are being stored, and the most recent lost ones.
#[derive(Default)]
pub(in crate::sandboxes) struct Captures {
    /// Receivers by id. A channel is closed when its snapshot is stored or lost; no value is sent.
    in_flight: Mutex<HashMap<String, watch::Receiver<()>>>,
    lost: Mutex<VecDeque<LostCapture>>,
}

/// Captured snapshot that cannot be completed.
struct LostCapture {
    record: Snapshot,
    reason: String,
}

/// Guard that marks a snapshot as being stored. Dropping it notifies the tasks that wait.
pub(in crate::sandboxes) struct StoringGuard {
    inner: Arc<SandboxesInner>,
    id: String,
    _storing: watch::Sender<()>,
}

impl Drop for StoringGuard {
    fn drop(&mut self) {
        self.inner.captures.in_flight.lock().remove(&self.id);
    }
}

impl Snapshots<'_> {
    /// Waits until the engine has captured `draft`, commits its record and acknowledges it. Returns
    /// `None` if the engine does not capture it, or if the record cannot be committed.
    pub(in crate::sandboxes) async fn acknowledge(
        self,
        draft: &Snapshot,
        frozen: oneshot::Receiver<u64>,
        acknowledgement: Acknowledgement,
    ) -> Option<StoringGuard> {
        let stopped_us = frozen.await.ok()?;
        let record = Snapshot {
            storing: true,
            stopped_ms: stopped_us as f64 / 1000.0,
            ..draft.clone()
        };
        // Create the guard before the record is visible, so that a reader of a `storing` record
        // finds it.
        let guard = self.begin_storing(&record.id);
        // An intent is the record of an incomplete snapshot. A complete record would make the
        // recovery after a crash use the snapshot without its files.
        let committed = self.0.catalog.change().commit_intent(record.clone());
        if let Err(e) = committed {
            tracing::warn!(
                id = record.id,
                error = %e,
                "cannot acknowledge a captured snapshot before it is stored"
            );
            return None;
        }
        // Ignore the error: the client may have disconnected.
        let _ = acknowledgement.send(record);
        Some(guard)
    }

    /// Marks a snapshot as being stored until the guard is dropped. Operations that need the files
    /// of the snapshot wait for the drop.
    fn begin_storing(self, id: &str) -> StoringGuard {
        let (storing, wait) = watch::channel(());
        self.0.captures.in_flight.lock().insert(id.to_owned(), wait);
        StoringGuard {
            inner: self.0.clone(),
            id: id.to_owned(),
            _storing: storing,
        }
    }

    /// Waits until snapshot `id` is stored, and returns it.
    pub(in crate::sandboxes) async fn stored(self, id: &str) -> Result<Snapshot, OperationError> {
        let storing = self.0.captures.in_flight.lock().get(id).cloned();
        if let Some(mut storing) = storing {
            // No value is sent: the wait ends when the sender is dropped.
            let _ = storing.changed().await;
        }
        let snapshot = self.0.catalog.get(id);
        snapshot.ok_or_else(|| {
            self.loss(|record| record.id == id)
                .unwrap_or_else(|| OperationError::Unknown {
                    what: "snapshot",
                    id: id.to_owned(),
                    list: "jiffy snapshots",
                })
        })
    }

    /// Removes the record of a captured snapshot that could not be stored.
    pub(in crate::sandboxes) fn lose(self, record: &Snapshot, reason: &str) {
        tracing::error!(id = record.id, reason, "lost a captured snapshot");
        // The reason is stored before the record is removed, so that a caller that no longer finds
        // the record finds the reason.
        let mut losses = self.0.captures.lost.lock();
        // The newest loss comes first, so the oldest is dropped.
        losses.truncate(MAX_LOST - 1);
        losses.push_front(LostCapture {
            record: record.clone(),
            reason: reason.to_owned(),
        });
        drop(losses);
        self.0.catalog.change().remove(&record.id);
    }

    fn loss(self, matches: impl Fn(&Snapshot) -> bool) -> Option<OperationError> {
        let losses = self.0.captures.lost.lock();
        let capture = losses.iter().find(|capture| matches(&capture.record))?;
        Some(OperationError::CaptureLost {
            id: capture.record.id.clone(),
            reason: capture.reason.clone(),
        })
    }

    /// Fails if snapshot `id` was captured and could not be stored. [`FetchScope::Requested`]
    /// ignores snapshots of other owners than `owner`, so that their ids are not disclosed.
    pub fn expect_not_lost(
        self,
        owner: Option<&str>,
        id: &str,
        scope: FetchScope,
    ) -> Result<(), OperationError> {
        let is_visible = |s: &Snapshot| scope == FetchScope::All || s.owner.as_deref() == owner;
        match self.loss(|record| record.id == id && is_visible(record)) {
            Some(lost) => Err(lost),
            None => Ok(()),
        }
    }
}

impl Sandboxes {
    /// Completes the captured snapshot `record` of the adopted guest of `entry` in the background.
    /// Returns once the task holds `op_lock`, so that operations on the sandbox wait for the
    /// snapshot.
    pub(in crate::sandboxes) async fn finish_captured(
        &self,
        entry: Arc<SandboxEntry>,
        guest: Arc<dyn Guest>,
        record: Snapshot,
    ) {
        let storing = self.snapshots().begin_storing(&record.id);
        // The journal already contains the record.
        self.0.catalog.change().index().insert(record.clone());
        // A shutdown waits for the snapshot as for an operation of a client.
        let operation = self.0.operations.count();
        let (locked, is_locked) = oneshot::channel();
        let this = self.clone();
        tokio::spawn(async move {
            let _op_guard = entry.op_lock().lock().await;
            let _ = locked.send(());
            let result = guest.finish_captured().await;
            let snapshots = this.snapshots();
            match result {
                Ok(times) => {
                    let complete = snapshots.complete(&*guest, record, times, |snapshot| {
                        vec![JournalChange::Sandbox(record_after_snapshot(
                            &entry, snapshot,
                        ))]
                    });
                    entry.set_record(record_after_snapshot(&entry, &complete));
                }
                Err(e) => {
                    snapshots.lose(&record, &e.to_string());
                    // The process that held the memory may have discarded the snapshot while no
                    // daemon was running. The engine then has no draft to clean up, so the files
                    // are removed here.
                    let host = this.clone();
                    let discard = move || host.discard_captured(&record);
                    // Ignore the error: the task panicked, and garbage collection removes the rest.
                    let _ = tokio::task::spawn_blocking(discard).await;
                }
            }
            drop((storing, operation));
        });
        // Ignore the error: the task has failed, and its lock is released.
        let _ = is_locked.await;
    }

    /// Removes the files of a captured snapshot whose guest is lost. Blocks.
    pub(in crate::sandboxes) fn discard_captured(&self, record: &Snapshot) {
        match self.0.engines.snapshot_files(&record.engine) {
            Ok(files) => files.discard_captured(&record.id),
            Err(e) => {
                tracing::warn!(id = record.id, error = %e, "cannot discard a captured snapshot")
            }
        }
    }
}
