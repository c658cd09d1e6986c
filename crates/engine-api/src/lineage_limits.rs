//! Limits for the length of lineages. A restore takes longer for each snapshot of the lineage.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.

/// Maximum lengths of the lineage of a snapshot that must be restored fast, in snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineageLimits {
    /// Above this length, the newest snapshots are merged, provided that this copies little data
    /// and makes the lineage short enough.
    pub cheap: usize,
    /// Above this length, all snapshots of the lineage are merged.
    pub longest: usize,
}
