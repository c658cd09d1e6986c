//! Recovery of what a killed daemon left behind.

use super::OperationError;
use crate::journal::{Journal, JournalChange};
use crate::records::{SandboxRecord, SandboxState, SnapshotPurpose, SnapshotRecord};
use jiffy_engine::{Engine, KeptGuest, now_ms};
use std::collections::{HashMap, HashSet};

pub(super) const DAEMON_STOPPED: &str = "the daemon was stopped while it ran";
const SNAPSHOT_LOST: &str = "the snapshot it slept in is gone from the disk";

/// State found at the start.
pub(super) struct RecoveredState {
    pub sandboxes: Vec<SandboxRecord>,
    pub snapshots: Vec<SnapshotRecord>,
    /// Guests that ran on, by sandbox.
    pub orphans: Vec<(String, KeptGuest)>,
}

/// Decides for everything that was under way whether it happened or not, and has the journal say
/// what the disk does. Files that belong to nothing are left to gc, which needs time.
pub(super) fn recover<E: Engine>(
    engine: &E,
    journal: &Journal,
    has_store: bool,
) -> Result<RecoveredState, OperationError> {
    let on_disk: HashSet<String> = engine
        .snapshots()
        .map_err(OperationError::engine("read the snapshots of this host"))?
        .into_iter()
        .collect();
    let mut sandboxes = journal.sandboxes()?;
    let places = sandboxes.iter().enumerate();
    let places: HashMap<String, usize> = places.map(|(at, s)| (s.id.clone(), at)).collect();
    let mut snapshots = Vec::new();
    let mut changes = Vec::new();
    for found in journal.snapshots()? {
        let record = found.record;
        let there = on_disk.contains(&record.id);
        // One whose files are complete lacked only its last word: it happened.
        let owner = places
            .get(&record.sandbox)
            .and_then(|&at| sandboxes.get_mut(at));
        let owner = owner.filter(|s| s.state == SandboxState::Running);
        match (found.complete, there, owner) {
            (true, true, _) => snapshots.push(record),
            (false, true, Some(sandbox)) => {
                sandbox.snapshot = Some(record.id.clone());
                if record.purpose == SnapshotPurpose::Pause {
                    sandbox.state = SandboxState::Paused;
                    sandbox.changed_ms = now_ms();
                }
                changes.push(JournalChange::Sandbox(sandbox.clone()));
                changes.push(JournalChange::Snapshot(record.clone()));
                snapshots.push(record);
            }
            _ => changes.push(JournalChange::NoSnapshot(record.id)),
        }
    }
    // Records of earlier versions, and of those whose last word was lacking, have no size. The
    // sizes of others are compared with the disk later: that takes time, which nobody has now.
    for record in snapshots.iter_mut().filter(|s| s.bytes == 0) {
        if let Some(bytes) = engine.snapshot_size(&record.id).filter(|bytes| *bytes != 0) {
            record.bytes = bytes;
            changes.push(JournalChange::Snapshot(record.clone()));
        }
    }
    let mut guests = journal.guests()?;
    let mut orphans = Vec::new();
    let known: HashSet<&String> = snapshots.iter().map(|s| &s.id).collect();
    for sandbox in &mut sandboxes {
        let there = sandbox.snapshot.as_ref().is_some_and(|s| known.contains(s));
        let cause = match sandbox.state {
            SandboxState::Running if let Some(handle) = guests.remove(&sandbox.id) => {
                let snapshot = sandbox.snapshot.clone();
                orphans.push((
                    sandbox.id.clone(),
                    KeptGuest {
                        handle,
                        snapshot,
                        network: sandbox.settings.rules(),
                    },
                ));
                continue;
            }
            SandboxState::Creating | SandboxState::Running => DAEMON_STOPPED,
            // The store may have what the disk has lost.
            SandboxState::Paused if !there && !has_store => SNAPSHOT_LOST,
            _ => continue,
        };
        sandbox.state = SandboxState::broken(cause);
        sandbox.changed_ms = now_ms();
        changes.push(JournalChange::Sandbox(sandbox.clone()));
    }
    journal.commit_write_behind(&changes);
    Ok(RecoveredState {
        sandboxes,
        snapshots,
        orphans,
    })
}
