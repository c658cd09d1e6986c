//! Records of the snapshots of this host, in memory and in the journal.
//!
//! The *journal* is the database of the daemon with the records of sandboxes and snapshots.
//!
//! Readers never wait for the disk: a change holds the lock of changes while it commits to the
//! journal, and locks the index only to apply the result. The journal and the index therefore
//! receive all changes in the same order.

use super::ranked_lock::{LockRank, RankedGuard, RankedMutex};
use super::snapshot_index::SnapshotIndex;
use crate::journal::{Journal, JournalChange, JournalError};
use crate::snapshot::Snapshot;
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

/// Numbers of pins, by id of the snapshot.
type Pins = HashMap<String, usize>;

/// Snapshots of this host, and the pins that protect them from garbage collection.
pub(super) struct SnapshotCatalog {
    journal: Arc<Journal>,
    /// Serialises changes. Locked before `index`.
    changes: RankedMutex<()>,
    index: RankedMutex<SnapshotIndex>,
    pins: Arc<RankedMutex<Pins>>,
}

/// Locked index for reading.
pub(super) struct IndexReader<'a>(RankedGuard<'a, SnapshotIndex>);

impl Deref for IndexReader<'_> {
    type Target = SnapshotIndex;

    fn deref(&self) -> &SnapshotIndex {
        &self.0
    }
}

/// Change of the catalog. Other changes wait until it is dropped.
pub(super) struct CatalogChange<'a> {
    catalog: &'a SnapshotCatalog,
    _changes: RankedGuard<'a, ()>,
}

/// Pin: protects a snapshot from garbage collection until it is dropped.
pub(crate) struct SnapshotPin {
    pins: Arc<RankedMutex<Pins>>,
    id: String,
}

impl Drop for SnapshotPin {
    fn drop(&mut self) {
        let mut pins = self.pins.lock();
        // Several operations may pin the same snapshot.
        if let Some(count) = pins.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                pins.remove(&self.id);
            }
        }
    }
}

impl SnapshotCatalog {
    pub fn new(index: SnapshotIndex, journal: Arc<Journal>) -> Self {
        Self {
            journal,
            changes: RankedMutex::new(LockRank::CatalogChanges, ()),
            index: RankedMutex::new(LockRank::CatalogIndex, index),
            pins: Arc::new(RankedMutex::new(LockRank::CatalogPins, Pins::new())),
        }
    }

    /// Locks the index for reading.
    pub fn read(&self) -> IndexReader<'_> {
        IndexReader(self.index.lock())
    }

    /// Returns the record of the snapshot with this complete id.
    pub fn get(&self, id: &str) -> Option<Snapshot> {
        self.read().get(id).cloned()
    }

    /// Begins a change. Waits for other changes, which may wait for the disk.
    pub fn change(&self) -> CatalogChange<'_> {
        CatalogChange {
            catalog: self,
            _changes: self.changes.lock(),
        }
    }

    /// Changes the record of a snapshot in the journal and in memory, and returns the new record.
    /// Returns `None` if there is no such snapshot, or if it is still being stored.
    pub fn update(&self, id: &str, change: impl FnOnce(&mut Snapshot)) -> Option<Snapshot> {
        let changing = self.change();
        // The record of a snapshot that is being stored is overwritten when the snapshot is
        // complete.
        let mut record = self.get(id).filter(|record| !record.storing)?;
        change(&mut record);
        changing.commit_write_behind(record.clone(), Vec::new());
        Some(record)
    }

    /// Protects snapshot `id`, which may not be complete yet, from garbage collection. A pin is
    /// needed between the completion of a snapshot and the commit of the record that references it.
    pub fn pin(&self, id: &str) -> SnapshotPin {
        *self.pins.lock().entry(id.to_owned()).or_insert(0) += 1;
        SnapshotPin {
            pins: self.pins.clone(),
            id: id.to_owned(),
        }
    }

    /// Locks the pins: no snapshot is pinned or released while the guard exists.
    pub fn pins(&self) -> RankedGuard<'_, Pins> {
        self.pins.lock()
    }
}

impl CatalogChange<'_> {
    /// Locks the index for changes.
    pub fn index(&self) -> RankedGuard<'_, SnapshotIndex> {
        self.catalog.index.lock()
    }

    /// Commits `record` as a complete snapshot together with `more`, then adds it to the index.
    ///
    /// # Errors
    /// Fails, without a change, if the journal cannot be written.
    pub fn commit(&self, record: Snapshot, more: Vec<JournalChange>) -> Result<(), JournalError> {
        // Write the journal before the index, so that no reader sees a snapshot that a crash could
        // undo.
        self.catalog.journal.commit(&with_snapshot(&record, more))?;
        self.index().insert(record);
        Ok(())
    }

    /// Commits `record` as a snapshot that is not complete, then adds it to the index.
    ///
    /// # Errors
    /// Fails, without a change, if the journal cannot be written.
    pub fn commit_intent(&self, record: Snapshot) -> Result<(), JournalError> {
        let intent = JournalChange::Intent(record.clone());
        self.catalog.journal.commit(&[intent])?;
        self.index().insert(record);
        Ok(())
    }

    /// Like [`Self::commit`] for a snapshot whose completion can no longer be rejected. If the
    /// journal cannot be written, the changes stay pending in memory until the journal's next
    /// write.
    pub fn commit_write_behind(&self, record: Snapshot, more: Vec<JournalChange>) {
        let changes = with_snapshot(&record, more);
        self.catalog.journal.commit_write_behind(&changes);
        self.index().insert(record);
    }

    /// Removes the record of a snapshot.
    pub fn remove(&self, id: &str) {
        let removed = JournalChange::NoSnapshot(id.to_owned());
        self.catalog.journal.commit_write_behind(&[removed]);
        self.index().remove(id);
    }
}

fn with_snapshot(record: &Snapshot, more: Vec<JournalChange>) -> Vec<JournalChange> {
    let mut changes = vec![JournalChange::Snapshot(record.clone())];
    changes.extend(more);
    changes
}
