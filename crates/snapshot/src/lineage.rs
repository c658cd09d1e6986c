//! Lineage: a snapshot with its chain of parents. Its layers together contain the memory and the
//! disks.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors.
//!
//! A *merge* copies the layers of ancestors into a snapshot. A *fold* copies the layers of a parent
//! into its only child. Both remove snapshots from lineages.

mod read_ahead;
mod working_set;

use crate::checked_snapshots::CheckedSnapshots;
use crate::{Manifest, Snapshot, SnapshotError, SnapshotLayer};
use std::path::Path;

/// Maximum length of a lineage that can be opened. Fast restores need much shorter lineages: see
/// [`crate::Store::merge`].
const MAX_LINEAGE: usize = 4096;

/// Snapshots from the oldest ancestor to the opened snapshot.
#[derive(Debug, Clone)]
pub struct Lineage(Vec<Snapshot>);

impl Lineage {
    /// Opens snapshot `id` and all of its ancestors.
    pub(crate) fn open(
        root: &Path,
        id: &str,
        checked: &CheckedSnapshots,
    ) -> Result<Self, SnapshotError> {
        let mut snapshots = vec![Snapshot::open(root, id, checked)?];
        let problem = |problem: String| SnapshotError::Lineage {
            id: id.to_owned(),
            problem,
        };
        while let Some(parent) = snapshots.last().and_then(|s| s.manifest().parent.clone()) {
            let child = snapshots.last().map_or(id, Snapshot::id).to_owned();
            // A cycle is only possible in damaged or manipulated manifests.
            if snapshots.iter().any(|s| s.id() == parent) {
                return Err(problem(format!("has a cycle at {parent}")));
            }
            if snapshots.len() >= MAX_LINEAGE {
                return Err(problem(format!("is longer than {MAX_LINEAGE} snapshots")));
            }
            let below = match Snapshot::open(root, &parent, checked) {
                Err(SnapshotError::Missing(parent)) => {
                    return Err(SnapshotError::Orphan { child, parent });
                }
                other => other?,
            };
            // All layers of a lineage are mapped into the same memory.
            let (upper, lower) = (snapshots.last().map(Snapshot::manifest), below.manifest());
            if upper.map(sizes) != Some(sizes(lower)) {
                return Err(problem(format!(
                    "has different sizes in {parent} and {child}"
                )));
            }
            snapshots.push(below);
        }
        snapshots.reverse();
        Ok(Self(snapshots))
    }

    /// Returns the snapshots, oldest first.
    pub fn snapshots(&self) -> &[Snapshot] {
        &self.0
    }

    /// Returns whether `later` consists of the same snapshots. The result is `false` if a merge or
    /// a fold removed snapshots from the lineage between both opens.
    pub fn is_same(&self, later: &Self) -> bool {
        let later = later.0.iter().map(Snapshot::id);
        self.0.iter().map(Snapshot::id).eq(later)
    }

    /// Returns the snapshot that was opened.
    pub fn newest(&self) -> Option<&Snapshot> {
        self.0.last()
    }

    /// Returns the index of the oldest snapshot with which the newest snapshot can be merged so
    /// that at most `max_bytes` are copied. The first snapshot of a lineage is never merged,
    /// because other lineages share it.
    pub fn oldest_to_merge(&self, max_bytes: u64) -> usize {
        let mut remaining = max_bytes;
        let mut oldest = self.0.len().saturating_sub(1);
        for (at, snapshot) in self.0.iter().enumerate().skip(1).rev() {
            match snapshot
                .bytes()
                // A snapshot whose size is unknown also ends the search.
                .ok()
                .and_then(|bytes| remaining.checked_sub(bytes))
            {
                Some(rest) => (remaining, oldest) = (rest, at),
                None => break,
            }
        }
        oldest
    }

    /// Returns the index of the oldest snapshot whose memory layer belongs to the memory of the
    /// newest snapshot. A guest that booted from the disks of a snapshot does not use its memory.
    pub(crate) fn memory_start(&self) -> usize {
        let complete = |snapshot: &Snapshot| snapshot.manifest().memory.complete;
        self.0.iter().rposition(complete).unwrap_or(0)
    }

    /// Returns the snapshots whose memory layers together contain the memory, oldest first.
    pub fn memory_snapshots(&self) -> &[Snapshot] {
        self.0.get(self.memory_start()..).unwrap_or_default()
    }

    /// Opens the memory layers, oldest first.
    pub fn memory(&self) -> Result<Vec<SnapshotLayer>, SnapshotError> {
        self.memory_snapshots()
            .iter()
            .map(Snapshot::memory)
            .collect()
    }

    /// Opens the layers of writable disk `number`, oldest first.
    pub fn disk(&self, number: usize) -> Result<Vec<SnapshotLayer>, SnapshotError> {
        self.0.iter().map(|s| s.disk(number)).collect()
    }

    /// Returns whether no layer of the memory has missing chunks.
    pub fn is_complete(&self) -> bool {
        self.memory_snapshots()
            .iter()
            .all(|s| s.check_complete().is_ok())
    }

    /// Checks that a snapshot with `manifest` can be a child of the newest snapshot.
    pub(crate) fn check_child(&self, manifest: &Manifest) -> Result<(), SnapshotError> {
        let below = self.newest().map(|parent| sizes(parent.manifest()));
        if below == Some(sizes(manifest)) {
            Ok(())
        } else {
            Err(SnapshotError::Lineage {
                id: manifest.id.clone(),
                problem: "has different sizes in the snapshot and its parent".to_owned(),
            })
        }
    }
}

/// Returns the sizes of memory and of each disk, in bytes.
fn sizes(manifest: &Manifest) -> (u64, Vec<u64>) {
    let disks = manifest.disks.iter().map(|disk| disk.bytes).collect();
    (manifest.memory.bytes, disks)
}
