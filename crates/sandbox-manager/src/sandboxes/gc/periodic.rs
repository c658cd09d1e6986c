//! Files and snapshots that belong to nothing, removed while everything runs.
//!
//! Each round looks at a part of the snapshots and of their files, so that it costs no more on a
//! host with many. After the start rounds follow each other until all was looked at once, for what
//! an earlier daemon left; later there is one in each interval.

use super::super::snapshot_engine::{DiskWalk, SnapshotOnDisk};
use super::super::{OperationError, Sandboxes};
use super::file_remover::remove_files;
use crate::{DirectoryLock, START_DELAY};
use jiffy_api_types::SnapshotPurpose;
use std::sync::Arc;
use std::time::Duration;

/// Snapshots, and files of snapshots, that one round looks at.
pub(in super::super) const MAX_PER_ROUND: usize = 1000;
/// Time between two rounds until all was looked at once.
const FIRST_ROUNDS_PAUSE: Duration = Duration::from_millis(100);

/// Position of gc between two rounds.
#[derive(Default)]
pub(in super::super) struct GcPosition {
    /// Snapshot that was looked at last; empty: none.
    snapshot: String,
    /// Files that were not looked at yet; none: all were.
    files: Option<DiskWalk>,
    /// True once every snapshot was looked at.
    snapshots_seen: bool,
    /// True once every file was looked at.
    files_seen: bool,
}

impl GcPosition {
    fn is_first_pass(&self) -> bool {
        !(self.snapshots_seen && self.files_seen)
    }
}

impl Sandboxes {
    /// Collects garbage every `every`, for as long as the sandboxes are there and the directory is
    /// theirs.
    pub(in super::super) fn spawn_gc(&self, every: Duration, lock: Option<Arc<DirectoryLock>>) {
        let inner = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            let mut position = GcPosition::default();
            tokio::time::sleep(START_DELAY.min(every)).await;
            loop {
                let Some(this) = inner.upgrade().map(Sandboxes) else {
                    return;
                };
                if lock.as_ref().is_some_and(|lock| !lock.is_in_place()) {
                    return tracing::error!("no gc: the data directory was removed or replaced");
                }
                let round = tokio::task::spawn_blocking(move || {
                    let collected = this.gc_round(&mut position);
                    (collected, position)
                });
                let collected;
                (collected, position) = match round.await {
                    Ok(round) => round,
                    Err(e) => {
                        tracing::error!("gc was lost: {e}");
                        (Ok(0), GcPosition::default())
                    }
                };
                let goes_on = position.is_first_pass() && collected.is_ok();
                match collected {
                    Ok(0) => {}
                    Ok(removed) => tracing::info!(removed, "removed orphaned files"),
                    Err(e) => tracing::warn!("cannot collect garbage: {e}"),
                }
                let pause = match goes_on {
                    true => FIRST_ROUNDS_PAUSE.min(every),
                    false => every,
                };
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Removes snapshots that nothing needs, files of snapshots that have no record, and whatever
    /// else was never finished. Returns how many things went. Blocks, looks at everything, and
    /// holds no lock while it looks at the disk.
    pub fn gc(&self) -> Result<usize, OperationError> {
        let templates = self.templates();
        templates.retire_outdated(&templates.kept(|_| true));
        self.snapshots().gc_all();
        let mut walk = self.0.walk_disk()?;
        let mut removed = self.gc_engine()?;
        loop {
            let (mut unknown, ended) = self.unknown(&mut walk)?;
            let found = unknown.len();
            remove_files(&self.0, &mut unknown);
            removed += found - unknown.len();
            if ended {
                return Ok(removed);
            }
        }
    }

    /// One round of [`Self::gc`], from `position` on.
    pub(in super::super) fn gc_round(
        &self,
        position: &mut GcPosition,
    ) -> Result<usize, OperationError> {
        let mut removed = match position.is_first_pass() && position.files.is_some() {
            true => 0,
            false => self.gc_engine()?,
        };
        let snapshots = self.0.catalog.read();
        let part = snapshots.following(&position.snapshot, MAX_PER_ROUND);
        let records = || part.iter().filter_map(|id| snapshots.get(id));
        let of_templates = records().filter(|s| s.purpose == SnapshotPurpose::Template);
        let templates: Vec<_> = of_templates.map(|s| s.id.clone()).collect();
        let unneeded = records().filter(|s| !s.kept);
        let unneeded: Vec<_> = unneeded.map(|s| s.id.clone()).collect();
        drop(snapshots);
        self.templates().retire_outdated(&templates);
        self.snapshots().gc(unneeded);
        position.snapshot = match part.len() < MAX_PER_ROUND {
            true => {
                position.snapshots_seen = true;
                String::new()
            }
            false => part.into_iter().next_back().unwrap_or_default(),
        };
        let mut walk = match position.files.take() {
            Some(walk) => walk,
            None => self.0.walk_disk()?,
        };
        let (unknown, ended) = self.unknown(&mut walk)?;
        removed += unknown.len();
        if !unknown.is_empty() {
            self.0.file_remover.remove(unknown);
        }
        match ended {
            true => position.files_seen = true,
            false => position.files = Some(walk),
        }
        Ok(removed)
    }

    fn gc_engine(&self) -> Result<usize, OperationError> {
        let mut removed = 0;
        for engine in self.0.engines.all() {
            let collected = engine.snapshot_files().gc();
            removed += collected.map_err(OperationError::engine("remove orphaned files"))?;
        }
        Ok(removed)
    }

    /// Those of the next snapshots on the disk that have no record, and true if there are no
    /// further ones.
    fn unknown(&self, walk: &mut DiskWalk) -> Result<(Vec<SnapshotOnDisk>, bool), OperationError> {
        let next: Result<Vec<SnapshotOnDisk>, _> = walk.by_ref().take(MAX_PER_ROUND).collect();
        let failed = OperationError::engine("read the snapshots of this host");
        let mut unknown = next.map_err(failed)?;
        let ended = unknown.len() < MAX_PER_ROUND;
        // In this order: a snapshot is held from before its first byte is on the disk until it has
        // its record.
        unknown.retain(|s| !self.0.catalog.pins().contains_key(&s.id));
        unknown.retain(|s| self.0.catalog.read().get(&s.id).is_none());
        Ok((unknown, ended))
    }
}
