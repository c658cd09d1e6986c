//! Recovery of what a killed daemon left behind.
//!
//! Clients wait for it: it reads the names of snapshots on the disk, and no file of theirs.

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
use jiffy_engine_api::{Engines, DetachedGuest, MICROVM, now_ms};
use smol_str::SmolStr;
use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};

pub(super) const DAEMON_STOPPED: &str = "the daemon was stopped while it ran";
const SNAPSHOT_LOST: &str = "the snapshot it slept in is gone from the disk";

/// State found at the start.
pub(super) struct RecoveredState {
    pub journal: Journal,
    pub sandboxes: BoxedRecords<Sandbox>,
    pub snapshots: BoxedRecords<Snapshot>,
    /// Guests that continued to run.
    pub orphans: Vec<Orphan>,
    /// Snapshots on the disk that have no record.
    pub unknown: Vec<SnapshotOnDisk>,
    /// Captured snapshots that the processes of these guests may still hold.
    pub storing: Vec<Snapshot>,
}

/// Guest that continued to run while no daemon was running.
pub(super) struct Orphan {
    /// Id of its sandbox.
    pub sandbox: String,
    /// Name of its engine.
    pub engine: String,
    pub guest: DetachedGuest,
}

/// Entries of these sandboxes and their indexes, and the index of these snapshots.
pub(super) fn index(
    sandboxes: BoxedRecords<Sandbox>,
    snapshots: BoxedRecords<Snapshot>,
) -> (Entries, Arc<EntryIndexes>, SnapshotIndex) {
    thread::scope(|threads| {
        let snapshots = threads.spawn(|| snapshots.into_iter().collect());
        let ids: Vec<SmolStr> = sandboxes.iter().map(|r| SmolStr::new(&*r.id)).collect();
        let records = sandboxes.iter().map(|record| &**record);
        let indexes = Arc::new(EntryIndexes::of(ids.iter().zip(records)));
        let entries = ids.into_iter().zip(sandboxes).map(|(id, record)| {
            let entry = SandboxEntry::indexed(id.clone(), record, indexes.clone());
            (id, Arc::new(entry))
        });
        let mut entries: Vec<_> = entries.collect();
        sort_by_text(&mut entries, |(id, _)| id);
        let entries = entries.into_iter().collect();
        (entries, indexes.clone(), joined(snapshots))
    })
}

fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Snapshots on the disk by id.
pub(super) type SnapshotsOnDisk = HashMap<SmolStr, FoundSnapshot>;

/// Snapshot on the disk.
pub(super) struct FoundSnapshot {
    engine: &'static str,
    has_record: bool,
}

/// Reads the ids of snapshots on the disk.
pub(super) fn on_disk(engines: &Engines) -> Result<SnapshotsOnDisk, OperationError> {
    let mut all = SnapshotsOnDisk::new();
    for engine in engines.all() {
        let ids = engine.snapshot_files().ids();
        let ids = ids.map_err(OperationError::engine("read the snapshots of this host"))?;
        let found = || FoundSnapshot {
            engine: engine.name(),
            has_record: false,
        };
        all.extend(ids.into_iter().map(|id| (id.into(), found())));
    }
    Ok(all)
}

/// Decides for everything that was under way whether it happened or not, and has the journal say
/// what the disk does. Files that belong to nothing are left to gc, which needs time.
pub(super) fn recover(
    engines: &Engines,
    mut on_disk: SnapshotsOnDisk,
    left: OpenedJournal,
    has_store: bool,
) -> Result<RecoveredState, OperationError> {
    let OpenedJournal {
        journal,
        mut sandboxes,
        snapshots: journalled,
        ..
    } = left;
    let mut snapshots = Vec::with_capacity(journalled.len());
    let (mut changes, mut captured) = (Vec::new(), Vec::new());
    for found in journalled {
        let mut record = found.snapshot;
        let has_files = match on_disk.get_mut(&*record.id) {
            Some(on_disk) if found.complete => {
                on_disk.has_record = true;
                snapshots.push(record);
                continue;
            }
            found => found.is_some(),
        };
        if !has_files && record.storing {
            captured.push(record);
            continue;
        }
        // It was acknowledged, whatever its sandbox is by now.
        let is_kept = std::mem::take(&mut record.storing);
        // Few were under way: each of them looks through all sandboxes.
        let under_way = has_files && !found.complete;
        let mut owners = sandboxes.iter_mut().filter(|s| s.id == record.sandbox);
        let owner = under_way.then(|| owners.next()).flatten();
        match owner.filter(|s| s.state == SandboxState::Running) {
            // One whose files are complete lacked only its last word: it happened.
            Some(sandbox) => {
                sandbox.snapshot = Some(record.id.clone());
                if record.purpose == SnapshotPurpose::Pause {
                    sandbox.state = SandboxState::Paused;
                    sandbox.changed_ms = now_ms();
                }
                changes.push(JournalChange::Sandbox((**sandbox).clone()));
                changes.push(JournalChange::Snapshot((*record).clone()));
                note_record(&mut on_disk, &record.id);
                snapshots.push(record);
            }
            None if is_kept => {
                changes.push(JournalChange::Snapshot((*record).clone()));
                note_record(&mut on_disk, &record.id);
                snapshots.push(record);
            }
            None => changes.push(JournalChange::NoSnapshot(record.id)),
        }
    }
    // Records of earlier versions, and of those whose last word was lacking, have no size. The
    // sizes of others are compared with the disk later: that takes time, which nobody has now.
    for record in snapshots.iter_mut().filter(|s| s.bytes == 0) {
        let files = engines.snapshot_files(&record.engine);
        let size = files.ok().and_then(|files| files.size(&record.id));
        if let Some(bytes) = size.filter(|bytes| *bytes != 0) {
            record.bytes = bytes;
            changes.push(JournalChange::Snapshot((**record).clone()));
        }
    }
    let mut guests = journal.guests()?;
    let (mut orphans, mut storing) = (Vec::new(), Vec::new());
    for sandbox in &mut sandboxes {
        let has_files = |id: &String| on_disk.get(id.as_str()).is_some_and(|s| s.has_record);
        let has_files = sandbox.snapshot.as_ref().is_some_and(has_files);
        let cause = match sandbox.state {
            SandboxState::Running if let Some(handle) = guests.remove(&sandbox.id) => {
                let snapshot = sandbox.snapshot.clone();
                // One at a time is taken of a sandbox.
                let of_it = captured.iter().position(|s| s.sandbox == sandbox.id);
                let capture = of_it.map(|at| captured.swap_remove(at));
                let captured = capture.as_ref().map(|s| s.id.clone());
                storing.extend(capture.map(|s| *s));
                orphans.push(Orphan {
                    sandbox: sandbox.id.clone(),
                    // Records of versions that had only this engine do not name it.
                    engine: sandbox.engine.clone().unwrap_or_else(|| MICROVM.to_owned()),
                    guest: DetachedGuest {
                        handle,
                        snapshot,
                        network: sandbox.settings.rules(),
                        captured,
                    },
                });
                continue;
            }
            SandboxState::Creating | SandboxState::Running => DAEMON_STOPPED,
            // The store may have what the disk has lost.
            SandboxState::Paused if !has_files && !has_store => SNAPSHOT_LOST,
            _ => continue,
        };
        sandbox.state = SandboxState::broken(cause);
        sandbox.changed_ms = now_ms();
        changes.push(JournalChange::Sandbox((**sandbox).clone()));
    }
    for lost in captured {
        tracing::error!(id = lost.id, "a captured snapshot was lost with its guest");
        if let Ok(files) = engines.snapshot_files(&lost.engine) {
            files.discard_captured(&lost.id);
        }
        changes.push(JournalChange::NoSnapshot(lost.id));
    }
    journal.commit_write_behind(&changes);
    let unknown = on_disk.into_iter().filter(|(_, found)| !found.has_record);
    let unknown = unknown.map(|(id, found)| SnapshotOnDisk {
        id: id.into(),
        engine: found.engine.to_owned(),
    });
    let unknown = unknown.collect();
    Ok(RecoveredState {
        unknown,
        journal,
        sandboxes,
        snapshots,
        orphans,
        storing,
    })
}

fn note_record(on_disk: &mut SnapshotsOnDisk, id: &str) {
    if let Some(found) = on_disk.get_mut(id) {
        found.has_record = true;
    }
}
