//! Snapshot with its chain of parents.

use crate::checked_snapshots::CheckedSnapshots;
use crate::{Snapshot, SnapshotError, SnapshotLayer};
use std::path::Path;

/// Longest lineage that can be opened. A restore needs a much shorter one: see
/// [`crate::Store::merge`].
const MAX_LINEAGE: usize = 4096;

/// Snapshots from the oldest ancestor to the one that was opened.
#[derive(Debug, Clone)]
pub struct Lineage(Vec<Snapshot>);

impl Lineage {
    pub(crate) fn open(
        root: &Path,
        id: &str,
        checked: &CheckedSnapshots,
    ) -> Result<Self, SnapshotError> {
        let mut row = vec![Snapshot::open(root, id, checked)?];
        let problem = |problem: String| SnapshotError::Lineage {
            id: id.to_owned(),
            problem,
        };
        while let Some(parent) = row.last().and_then(|s| s.manifest().parent.clone()) {
            let child = row.last().map_or(id, Snapshot::id).to_owned();
            if row.iter().any(|s| s.id() == parent) {
                return Err(problem(format!("goes in a circle at {parent}")));
            }
            if row.len() >= MAX_LINEAGE {
                return Err(problem(format!("is longer than {MAX_LINEAGE} snapshots")));
            }
            let below = match Snapshot::open(root, &parent, checked) {
                Err(SnapshotError::Missing(parent)) => {
                    return Err(SnapshotError::Orphan { child, parent });
                }
                other => other?,
            };
            let (upper, lower) = (row.last().map(Snapshot::manifest), below.manifest());
            let sizes = |m: &crate::Manifest| {
                let disks: Vec<u64> = m.disks.iter().map(|d| d.bytes).collect();
                (m.memory.bytes, disks)
            };
            if upper.map(sizes) != Some(sizes(lower)) {
                return Err(problem(format!(
                    "changes its sizes between {parent} and {child}"
                )));
            }
            row.push(below);
        }
        row.reverse();
        Ok(Self(row))
    }

    /// The snapshots, oldest first.
    pub fn snapshots(&self) -> &[Snapshot] {
        &self.0
    }

    /// False if snapshots of this one were merged when `later` was opened.
    pub fn is_same(&self, later: &Self) -> bool {
        let later = later.0.iter().map(Snapshot::id);
        self.0.iter().map(Snapshot::id).eq(later)
    }

    /// Snapshot that was opened.
    pub fn newest(&self) -> Option<&Snapshot> {
        self.0.last()
    }

    /// Number of the oldest snapshot with which the newest can be merged so that at most
    /// `max_bytes` are copied. The oldest of all stays: others lie on it, too.
    pub fn oldest_to_merge(&self, max_bytes: u64) -> usize {
        let mut left = max_bytes;
        let mut oldest = self.0.len().saturating_sub(1);
        for (at, snapshot) in self.0.iter().enumerate().skip(1).rev() {
            match snapshot
                .bytes()
                .ok()
                .and_then(|bytes| left.checked_sub(bytes))
            {
                Some(rest) => (left, oldest) = (rest, at),
                None => break,
            }
        }
        oldest
    }

    /// Memory layers, oldest first.
    pub fn memory(&self) -> Result<Vec<SnapshotLayer>, SnapshotError> {
        self.0.iter().map(Snapshot::memory).collect()
    }

    /// Layers of writable disk `number`, oldest first.
    pub fn disk(&self, number: usize) -> Result<Vec<SnapshotLayer>, SnapshotError> {
        self.0.iter().map(|s| s.disk(number)).collect()
    }
}
