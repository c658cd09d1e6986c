//! Comparison of all local sandboxes with their heads, after this host has registered in the fleet.
//! A head is the record in the store that decides which host may run a sandbox. While this host was
//! down, other hosts may have resumed or killed its sandboxes.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran. An *epoch* of a member
//! lasts from its registration with the coordinator until the coordinator declares it dead.

use super::entry::SandboxEntry;
use super::{OperationError, Sandboxes};
use crate::journal::JournalChange;
use jiffy_api_types::SandboxState;
use jiffy_fleet::LocalSandbox;
use jiffy_fleet_core::{Reconciliation, Revision};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Maximum number of heads that are read at the same time.
const MAX_CONCURRENT: usize = 16;

impl Sandboxes {
    /// Marks all sandboxes as not compared with their heads. A member of a fleet calls this at its
    /// start, before it serves requests: other hosts may have changed the sandboxes.
    pub fn expect_comparison(&self) {
        self.0.has_uncompared.store(true, Ordering::SeqCst);
        for entry in self.0.entries.lock().values() {
            entry.set_uncompared(true);
        }
    }

    /// Waits until a sandbox was compared with its head, if it must be. Returns whether the
    /// comparison has ended within `limit`.
    pub async fn until_compared(&self, id: &str, limit: Duration) -> bool {
        // This check covers the usual case without a lock.
        if !self.0.has_uncompared.load(Ordering::SeqCst) {
            return true;
        }
        let is_uncompared = || {
            let entries = self.0.entries.lock();
            entries.get(id).is_some_and(|entry| entry.is_uncompared())
        };
        let compared = async {
            loop {
                // The waiter is registered before the check, so that no notification is missed.
                let changed = self.0.compared.notified();
                if !is_uncompared() {
                    return;
                }
                changed.await;
            }
        };
        !is_uncompared() || timeout(limit, compared).await.is_ok()
    }

    /// Compares all sandboxes that may have a head with their heads. With `all`, also compares
    /// sandboxes that this host has never stored: after its death, other hosts may have killed
    /// them. Stops and removes the sandboxes that another host has taken over, and the sandboxes
    /// whose heads are marked as killed. Makes this host's current epoch the owner of the remaining
    /// sandboxes. After an error, the caller must repeat the call.
    ///
    /// # Errors
    /// The id of a sandbox that could not be compared, with the reason. The others were compared.
    pub async fn reconcile_heads(&self, all: bool) -> Result<(), (String, OperationError)> {
        self.expect_comparison();
        let entries: Vec<_> = self.0.entries.lock().values().cloned().collect();
        let mut waiting = entries.into_iter();
        let mut running = JoinSet::new();
        let mut result = Ok(());
        loop {
            while running.len() < MAX_CONCURRENT
                && let Some(entry) = waiting.next()
            {
                let this = self.clone();
                running.spawn(async move {
                    let reconciled = this.reconcile_entry(&entry, all).await;
                    if reconciled.is_ok() {
                        entry.set_uncompared(false);
                        this.0.compared.notify_waiters();
                    }
                    reconciled.map_err(|e| (entry.id(), e))
                });
            }
            match running.join_next().await {
                None => {
                    self.0
                        .has_uncompared
                        .store(result.is_err(), Ordering::SeqCst);
                    return result;
                }
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => result = Err(error),
                Some(Err(e)) => {
                    result = Err((String::new(), OperationError::Lost(e.to_string())));
                }
            }
        }
    }

    /// Compares one sandbox with its head, and acts upon the result: retains the sandbox, makes
    /// this host its owner again, or stops its guest and removes it. Without `all`, sandboxes that
    /// were never stored are skipped.
    async fn reconcile_entry(
        &self,
        entry: &Arc<SandboxEntry>,
        all: bool,
    ) -> Result<(), OperationError> {
        let Some(heads) = self.0.heads.clone() else {
            return Ok(());
        };
        let _op_guard = entry.op_lock().lock().await;
        let record = entry.record();
        // Three kinds of sandboxes are skipped. A sandbox that is being created has no head. The
        // kill of a killed sandbox marks its head. A sandbox that another host stored
        // (`is_adopted`) is being resumed, and the resume claims its head.
        let is_skipped = matches!(record.state, SandboxState::Creating | SandboxState::Killed);
        if is_skipped || !(all || entry.may_be_stored()) || entry.is_adopted() {
            return Ok(());
        }
        let snapshot = record.snapshot.as_deref();
        let snapshot = snapshot.and_then(|id| self.0.catalog.get(id));
        let place = self.place_of(&record);
        let is_paused = record.state == SandboxState::Paused;
        // Hash that identifies the copy of the pause in the store. `None` if there is no copy.
        let root = snapshot.as_ref().filter(|_| is_paused);
        let root = root.and_then(|snapshot| snapshot.store.root(&place));
        let local = LocalSandbox {
            // A broken sandbox counts as running: the state of its last guest is newer than any of
            // its pauses.
            is_running: !is_paused,
            revision: entry.head_revision().map(Revision),
            root,
        };
        let owner = record.settings.owner.as_deref();
        let (action, revision) = heads.reconcile(owner, &record.id, &local).await?;
        match action {
            Reconciliation::Retain | Reconciliation::Adopt => {
                if let Some(Revision(revision)) = revision {
                    let stored = record.snapshot.as_deref();
                    let is_stored = action == Reconciliation::Retain && root.is_some();
                    self.set_head(entry, revision, stored.filter(|_| is_stored));
                }
            }
            Reconciliation::Remove | Reconciliation::Kill => {
                if let Some(guest) = entry.replace_guest(None) {
                    tracing::warn!(
                        id = record.id,
                        "stopping a sandbox that another host took over"
                    );
                    self.stop_guest(guest).await;
                }
                if action == Reconciliation::Remove {
                    self.forget_moved(entry);
                } else {
                    let change = JournalChange::NoSandbox(record.id.clone());
                    self.0.journal.commit_write_behind(&[change]);
                    self.0.entries.lock().remove(entry.shared_id());
                    self.0.gc.collect(record.snapshot);
                }
            }
        }
        Ok(())
    }

    /// Records the revision of the head of a sandbox.
    pub(super) fn set_head(&self, entry: &SandboxEntry, revision: u64, stored: Option<&str>) {
        entry.set_head_revision(revision);
        entry.with_record(|record| {
            let observer = &self.0.indexes.observer;
            observer.head_changed(record, revision, stored);
        });
    }
}
