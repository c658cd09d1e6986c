//! Sample of the CPU time since boot.

/// CPU time since boot in ticks.
#[derive(Debug, Clone, Copy)]
pub struct CpuSample {
    /// Time that was neither idle nor spent waiting for disks.
    pub busy: u64,
    /// Total time.
    pub total: u64,
}
