//! Periodic garbage collection.
//!
//! Each round checks a part of the snapshots and of their files, so that its cost does not grow
//! with their number. After the start, rounds follow each other until everything was checked once,
//! since an earlier daemon may have left garbage. Later there is one round in each interval.
//!
//! A *pin* protects a snapshot from garbage collection. The snapshot of a template is *retired* if
//! new sandboxes must not use it any longer, for example after a change of the template.

use super::super::snapshot_engine::{DiskWalk, SnapshotOnDisk};
use super::super::{OperationError, Sandboxes};
use super::GarbageCollector;
use super::file_remover::remove_files;
use crate::{DirectoryLock, START_DELAY};
use jiffy_api_types::SnapshotPurpose;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of records, and of snapshots on the disk, that one round checks.
const MAX_PER_ROUND: usize = 1000;
/// Pause between two rounds of the first pass, so that they do not compete with clients.
const FIRST_ROUNDS_PAUSE: Duration = Duration::from_millis(100);

/// Position of garbage collection between two rounds.
#[derive(Default)]
struct GcPosition {
    /// Snapshot that was checked last. Empty at the start of a pass.
    snapshot: String,
    /// Files that were not checked yet. `None` at the start of a pass.
    files: Option<DiskWalk>,
    /// Every snapshot was checked once.
    snapshots_seen: bool,
    /// Every file was checked once.
    files_seen: bool,
}

impl GcPosition {
    fn is_first_pass(&self) -> bool {
        !(self.snapshots_seen && self.files_seen)
    }
}

impl Sandboxes {
    /// Starts the task that collects garbage every `interval` while the sandboxes exist and the
    /// directory is locked by this daemon.
    pub(in super::super) fn spawn_gc(&self, interval: Duration, lock: Option<Arc<DirectoryLock>>) {
        // The task needs the sandboxes: a retired template snapshot also leaves the warm pool.
        let weak = self.downgrade();
        tokio::spawn(async move {
            let mut position = GcPosition::default();
            tokio::time::sleep(START_DELAY.min(interval)).await;
            loop {
                let Some(this) = weak.upgrade() else {
                    return;
                };
                // Another daemon may own the directory now. This daemon has no records of the other
                // daemon's files, and would remove them.
                if lock.as_ref().is_some_and(|lock| !lock.is_in_place()) {
                    return tracing::error!(
                        "stopped garbage collection: the data directory was removed or replaced"
                    );
                }
                // A round reads directories and manifests.
                let round = tokio::task::spawn_blocking(move || {
                    let retire = |ids: &[String]| this.templates().retire_outdated(ids);
                    let collected = this.0.gc.run_round(&mut position, retire);
                    (collected, position)
                });
                let collected;
                (collected, position) = match round.await {
                    Ok(round) => round,
                    Err(e) => {
                        tracing::error!(error = %e, "garbage collection failed unexpectedly");
                        // The position was lost with the task, so a new pass starts.
                        (Ok(0), GcPosition::default())
                    }
                };
                let has_more = position.is_first_pass() && collected.is_ok();
                match collected {
                    Ok(0) => {}
                    Ok(removed) => tracing::info!(removed, "removed orphaned files"),
                    Err(e) => tracing::warn!(error = %e, "cannot collect garbage"),
                }
                let pause = if has_more {
                    FIRST_ROUNDS_PAUSE.min(interval)
                } else {
                    interval
                };
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Removes unneeded snapshots, files of snapshots without a record, and incomplete files of
    /// engines. Returns the number of removals, where all files of a snapshot without a record
    /// count as one. Blocks, checks everything, and holds no lock while it reads the disk.
    pub fn gc(&self) -> Result<usize, OperationError> {
        self.templates().retire_removed();
        self.0.gc.collect_all();
        self.0.gc.remove_orphaned_files()
    }
}

impl GarbageCollector {
    /// Removes all files of snapshots without a record, and incomplete files of engines. Returns
    /// their number as [`Sandboxes::gc`] does.
    fn remove_orphaned_files(&self) -> Result<usize, OperationError> {
        let mut walk = self.parts.engines.walk_disk()?;
        let mut removed = self.parts.engines.gc()?;
        loop {
            let (mut orphans, is_end) = self.next_orphans(&mut walk)?;
            let count = orphans.len();
            remove_files(&self.parts.engines, &mut orphans);
            removed += count - orphans.len();
            if is_end {
                return Ok(removed);
            }
        }
    }

    /// Performs one round of [`Sandboxes::gc`] from `position` on. Calls `retire_outdated` with the
    /// template snapshots among the checked ones. Returns the number of removals, which includes
    /// queued ones.
    fn run_round(
        &self,
        position: &mut GcPosition,
        retire_outdated: impl FnOnce(&[String]),
    ) -> Result<usize, OperationError> {
        // Incomplete files are searched once at the start of the first pass, whose rounds follow
        // each other quickly. After the first pass, they are searched in each round.
        let mut removed = if position.is_first_pass() && position.files.is_some() {
            0
        } else {
            self.parts.engines.gc()?
        };
        let snapshots = self.parts.catalog.read();
        let part = snapshots.following(&position.snapshot, MAX_PER_ROUND);
        let records = || part.iter().filter_map(|id| snapshots.get(id));
        let of_templates = records().filter(|s| s.purpose == SnapshotPurpose::Template);
        let templates: Vec<_> = of_templates.map(|s| s.id.clone()).collect();
        let unneeded = records().filter(|s| !s.retained);
        let unneeded: Vec<_> = unneeded.map(|s| s.id.clone()).collect();
        drop(snapshots);
        retire_outdated(&templates);
        self.collect(unneeded);
        position.snapshot = if part.len() < MAX_PER_ROUND {
            position.snapshots_seen = true;
            String::new()
        } else {
            part.into_iter().next_back().unwrap_or_default()
        };
        let mut walk = match position.files.take() {
            Some(walk) => walk,
            None => self.parts.engines.walk_disk()?,
        };
        let (orphans, is_end) = self.next_orphans(&mut walk)?;
        removed += orphans.len();
        self.remove_files(orphans);
        if is_end {
            position.files_seen = true;
        } else {
            position.files = Some(walk);
        }
        Ok(removed)
    }

    /// Returns the snapshots without a record among the next ones on the disk, and whether the walk
    /// has ended.
    fn next_orphans(
        &self,
        walk: &mut DiskWalk,
    ) -> Result<(Vec<SnapshotOnDisk>, bool), OperationError> {
        let next: Result<Vec<SnapshotOnDisk>, _> = walk.by_ref().take(MAX_PER_ROUND).collect();
        let failed = OperationError::engine("read the snapshots of this host");
        let mut orphans = next.map_err(failed)?;
        let is_end = orphans.len() < MAX_PER_ROUND;
        // The pins are checked before the records: a snapshot is pinned from before its first byte
        // is on the disk until it has its record. In the reverse order, a snapshot that is
        // completed in between would count as orphaned.
        orphans.retain(|s| !self.parts.catalog.pins().contains_key(&s.id));
        orphans.retain(|s| self.parts.catalog.read().get(&s.id).is_none());
        Ok((orphans, is_end))
    }
}
