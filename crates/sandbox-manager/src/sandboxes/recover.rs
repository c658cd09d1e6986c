//! Recovery of the state that a killed daemon left: compares the journal with the snapshots on the
//! disk, and finds the guests that are still running.
//!
//! Clients wait for the recovery, so it lists the snapshots on the disk but reads none of their
//! files.
//!
//! The *journal* is the database of the daemon with the records of sandboxes and snapshots. A
//! *captured* snapshot is acknowledged to its client, but its files are not complete yet: its
//! record is `storing`.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

use super::OperationError;
use super::entry::{Entries, SandboxEntry};
use super::entry_indexes::EntryIndexes;
use super::id_groups::sort_by_text;
use super::snapshot_engine::SnapshotOnDisk;
use super::snapshot_index::SnapshotIndex;
use crate::journal::BoxedRecords;
use crate::journal::{Journal, JournalChange, OpenedJournal};
use crate::sandbox::Sandbox;
use crate::snapshot::Snapshot;
use jiffy_api_types::{SandboxState, SnapshotPurpose};
use jiffy_engine_api::{DetachedGuest, Engines, MICROVM, now_ms};
use smol_str::SmolStr;
use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};

// Causes that records of broken sandboxes contain.
pub(super) const DAEMON_STOPPED: &str = "the daemon exited while the sandbox was running";
const SNAPSHOT_LOST: &str = "the snapshot it was paused in is missing from the disk";

/// State after the recovery.
pub(super) struct RecoveredState {
    pub journal: Journal,
    pub sandboxes: BoxedRecords<Sandbox>,
    pub snapshots: BoxedRecords<Snapshot>,
    /// Guests that continued to run.
    pub orphans: Vec<Orphan>,
    /// Snapshots on the disk without a record. Their files are orphaned.
    pub unknown: Vec<SnapshotOnDisk>,
    /// Captured snapshots (see `snapshots::capture`) that are not stored yet. The processes of
    /// `orphans` may still hold their memory.
    pub storing: Vec<Snapshot>,
    /// Sandboxes whose state changed.
    pub changed: Vec<Sandbox>,
}

/// Guest that continued to run while no daemon was running.
pub(super) struct Orphan {
    /// Id of its sandbox.
    pub sandbox: String,
    /// Name of its engine.
    pub engine: String,
    pub guest: DetachedGuest,
}

/// Creates the entries of the sandboxes with their indexes, and the index of the snapshots.
pub(super) fn index(
    sandboxes: BoxedRecords<Sandbox>,
    snapshots: BoxedRecords<Snapshot>,
) -> (Entries, Arc<EntryIndexes>, SnapshotIndex) {
    thread::scope(|threads| {
        // Read both indexes in parallel, because clients wait for them.
        let snapshots = threads.spawn(|| snapshots.into_iter().collect());
        let ids: Vec<SmolStr> = sandboxes.iter().map(|r| SmolStr::new(&*r.id)).collect();
        let records = sandboxes.iter().map(|record| &**record);
        let indexes = Arc::new(EntryIndexes::of(ids.iter().zip(records)));
        let entries = ids.into_iter().zip(sandboxes).map(|(id, record)| {
            let entry = SandboxEntry::indexed(id.clone(), record, indexes.clone());
            (id, Arc::new(entry))
        });
        // A sorted sequence builds the tree faster than separate insertions.
        let mut entries: Vec<_> = entries.collect();
        sort_by_text(&mut entries, |(id, _)| id);
        let entries = entries.into_iter().collect();
        (entries, indexes.clone(), join(snapshots))
    })
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Snapshots on the disk by id.
pub(super) type SnapshotsOnDisk = HashMap<SmolStr, SnapshotState>;

/// Snapshot on the disk.
pub(super) struct SnapshotState {
    engine: &'static str,
    /// True if the journal has a record of the snapshot.
    has_record: bool,
}

/// Reads the ids of snapshots on the disk.
pub(super) fn on_disk(engines: &Engines) -> Result<SnapshotsOnDisk, OperationError> {
    let mut all = SnapshotsOnDisk::new();
    for engine in engines.all() {
        let ids = engine.snapshot_files().ids();
        let ids = ids.map_err(OperationError::engine("read the snapshots of this host"))?;
        let state = || SnapshotState {
            engine: engine.name(),
            has_record: false,
        };
        all.extend(ids.into_iter().map(|id| (id.into(), state())));
    }
    Ok(all)
}

/// Decides for each operation in flight at the crash whether it happened, and makes the journal
/// agree with the disk. Orphaned files are left to garbage collection, which takes longer.
/// `has_store` states whether this host has a shared store.
pub(super) fn recover(
    engines: &Engines,
    mut on_disk: SnapshotsOnDisk,
    opened: OpenedJournal,
    has_store: bool,
) -> Result<RecoveredState, OperationError> {
    let OpenedJournal {
        journal,
        mut sandboxes,
        snapshots: journalled,
        ..
    } = opened;
    let mut changed = Vec::new();
    // Pass 1: snapshots. `entry.complete` is false for the record of a snapshot that was in flight.
    // Its files may be complete nevertheless: `on_disk` contains only snapshots with all files.
    let mut snapshots = Vec::with_capacity(journalled.len());
    let (mut changes, mut captured) = (Vec::new(), Vec::new());
    for entry in journalled {
        let mut record = entry.snapshot;
        let has_files = match on_disk.get_mut(&*record.id) {
            Some(on_disk) if entry.complete => {
                on_disk.has_record = true;
                snapshots.push(record);
                continue;
            }
            on_disk => on_disk.is_some(),
        };
        if !has_files && record.storing {
            // The files may still be in the memory of a guest, which pass 2 finds.
            captured.push(record);
            continue;
        }
        // A record with `storing` was acknowledged to a client, so the snapshot is retained in any
        // state of its sandbox.
        let is_retained = std::mem::take(&mut record.storing);
        // Few snapshots were in flight, so a linear search for their sandboxes is fast enough.
        let was_in_flight = has_files && !entry.complete;
        let mut owners = sandboxes.iter_mut().filter(|s| s.id == record.sandbox);
        let owner = was_in_flight.then(|| owners.next()).flatten();
        match owner.filter(|s| s.state == SandboxState::Running) {
            // The files are complete and only the final commit is missing: the operation happened.
            Some(sandbox) => {
                sandbox.snapshot = Some(record.id.clone());
                if record.purpose == SnapshotPurpose::Pause {
                    sandbox.state = SandboxState::Paused;
                    sandbox.changed_ms = now_ms();
                    changed.push((**sandbox).clone());
                }
                changes.push(JournalChange::Sandbox((**sandbox).clone()));
                changes.push(JournalChange::Snapshot((*record).clone()));
                note_record(&mut on_disk, &record.id);
                snapshots.push(record);
            }
            None if is_retained => {
                changes.push(JournalChange::Snapshot((*record).clone()));
                note_record(&mut on_disk, &record.id);
                snapshots.push(record);
            }
            // The snapshot has no files, or its operation was in flight and its sandbox is not
            // running.
            None => changes.push(JournalChange::NoSnapshot(record.id)),
        }
    }
    // Records of early versions and of snapshots without a final commit have no size. The upkeep
    // thread compares the sizes of the others with the disk later, since that takes longer.
    for record in snapshots.iter_mut().filter(|s| s.bytes == 0) {
        let files = engines.snapshot_files(&record.engine);
        let size = files.ok().and_then(|files| files.size(&record.id));
        if let Some(bytes) = size.filter(|bytes| *bytes != 0) {
            record.bytes = bytes;
            changes.push(JournalChange::Snapshot((**record).clone()));
        }
    }
    // `guests` contains running sandboxes only: the journal removes a handle in the same write that
    // records another state of its sandbox.
    let mut guests = journal.guests()?;
    let (mut orphans, mut storing) = (Vec::new(), Vec::new());
    // Pass 2: sandboxes. A sandbox that has lost its guest or its snapshot is broken.
    for sandbox in &mut sandboxes {
        let has_files = |id: &String| on_disk.get(id.as_str()).is_some_and(|s| s.has_record);
        let has_files = sandbox.snapshot.as_ref().is_some_and(has_files);
        let cause = match sandbox.state {
            SandboxState::Running if let Some(handle) = guests.remove(&sandbox.id) => {
                let snapshot = sandbox.snapshot.clone();
                // At most one snapshot of a sandbox is taken at a time.
                let position = captured.iter().position(|s| s.sandbox == sandbox.id);
                let capture = position.map(|at| captured.swap_remove(at));
                let captured = capture.as_ref().map(|s| s.id.clone());
                // The record stays in the journal until the adopted guest has completed the
                // snapshot.
                storing.extend(capture.map(|s| *s));
                orphans.push(Orphan {
                    sandbox: sandbox.id.clone(),
                    // Records of early versions, which had only this engine, do not name it.
                    engine: sandbox.engine.clone().unwrap_or_else(|| MICROVM.to_owned()),
                    guest: DetachedGuest {
                        handle,
                        snapshot,
                        network: sandbox.network_rules(),
                        captured,
                    },
                });
                continue;
            }
            SandboxState::Creating | SandboxState::Running => DAEMON_STOPPED,
            // The store may have the files that the disk has lost.
            SandboxState::Paused if !has_files && !has_store => SNAPSHOT_LOST,
            _ => continue,
        };
        sandbox.state = SandboxState::broken(cause);
        sandbox.changed_ms = now_ms();
        changed.push((**sandbox).clone());
        changes.push(JournalChange::Sandbox((**sandbox).clone()));
    }
    // Captured snapshots whose guest is no longer running.
    for record in captured {
        tracing::error!(
            id = record.id,
            "a captured snapshot was lost with its guest"
        );
        if let Ok(files) = engines.snapshot_files(&record.engine) {
            // Unfinished files of the snapshot would otherwise stay until garbage collection.
            files.discard_captured(&record.id);
        }
        changes.push(JournalChange::NoSnapshot(record.id));
    }
    // Write-behind commits are not rejected if the disk is full: the crash has already happened.
    journal.commit_write_behind(&changes);
    let unknown = on_disk.into_iter().filter(|(_, state)| !state.has_record);
    let unknown = unknown.map(|(id, state)| SnapshotOnDisk {
        id: id.into(),
        engine: state.engine.to_owned(),
    });
    let unknown = unknown.collect();
    Ok(RecoveredState {
        unknown,
        journal,
        sandboxes,
        snapshots,
        orphans,
        storing,
        changed,
    })
}

fn note_record(on_disk: &mut SnapshotsOnDisk, id: &str) {
    if let Some(state) = on_disk.get_mut(id) {
        state.has_record = true;
    }
}
