//! What a daemon that was killed left behind, put in order.

use super::OperationError;
use super::collect::remove_files;
use crate::journal::{Change, Journal};
use crate::record::{Purpose, SandboxRecord, SnapshotRecord, State, now_ms};
use jiffy_engine::Engine;
use std::collections::HashSet;

/// Guests end with the daemon.
pub(super) const DAEMON_STOPPED: &str = "the daemon was stopped while it ran";
const SNAPSHOT_LOST: &str = "the snapshot it slept in is gone from the disk";

/// What there is at the start.
pub(super) struct Recovered {
    pub sandboxes: Vec<SandboxRecord>,
    pub snapshots: Vec<SnapshotRecord>,
}

/// Decides for everything that was under way whether it happened or not, makes journal and disk say the same, and removes what
/// belongs to nobody.
pub(super) fn recover<E: Engine>(
    engine: &E,
    journal: &Journal,
) -> Result<Recovered, OperationError> {
    let on_disk: HashSet<String> = engine
        .snapshots()
        .map_err(OperationError::engine("read the snapshots of this host"))?
        .into_iter()
        .collect();
    let mut sandboxes = journal.sandboxes()?;
    let mut snapshots = Vec::new();
    let mut changes = Vec::new();
    for found in journal.snapshots()? {
        let record = found.record;
        let there = on_disk.contains(&record.id);
        // A pause whose files are complete lacked only its last word, and its guest is gone: it happened.
        let sleeper = sandboxes
            .iter_mut()
            .find(|s| record.purpose == Purpose::Pause && s.id == record.sandbox);
        match (found.complete, there, sleeper) {
            (true, true, _) => snapshots.push(record),
            (false, true, Some(sandbox)) if sandbox.state == State::Running => {
                sandbox.state = State::Paused;
                sandbox.snapshot = Some(record.id.clone());
                sandbox.changed_ms = now_ms();
                changes.push(Change::Sandbox(sandbox.clone()));
                changes.push(Change::Snapshot(record.clone()));
                snapshots.push(record);
            }
            _ => changes.push(Change::NoSnapshot(record.id)),
        }
    }
    let known: HashSet<&String> = snapshots.iter().map(|s| &s.id).collect();
    for sandbox in &mut sandboxes {
        let there = sandbox.snapshot.as_ref().is_some_and(|s| known.contains(s));
        let cause = match sandbox.state {
            State::Creating | State::Running => DAEMON_STOPPED,
            State::Paused if !there => SNAPSHOT_LOST,
            _ => continue,
        };
        sandbox.state = State::Broken {
            cause: cause.to_owned(),
        };
        sandbox.changed_ms = now_ms();
        changes.push(Change::Sandbox(sandbox.clone()));
    }
    journal.commit(&changes)?;
    let mut orphans: Vec<String> = on_disk
        .into_iter()
        .filter(|id| !known.contains(id))
        .collect();
    remove_files(engine, &mut orphans);
    Ok(Recovered {
        sandboxes,
        snapshots,
    })
}
