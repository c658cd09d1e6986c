//! Lengths of lineages.

/// Longest lineages, in snapshots, of a snapshot that is to be restored fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineageLimits {
    /// Beyond this the newest are merged, if that copies little and is enough.
    pub cheap: usize,
    /// Beyond this all are merged.
    pub longest: usize,
}
