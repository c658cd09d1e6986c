//! Limits for the length of lineages.

/// Maximum lengths of the lineage of a snapshot that must be restored fast, in snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineageLimits {
    /// Above this length, the newest snapshots are merged if that copies little data and is
    /// sufficient.
    pub cheap: usize,
    /// Above this length, all snapshots of the lineage are merged.
    pub longest: usize,
}
