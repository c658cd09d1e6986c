//! Sample of the processor time since boot.

/// Processor time since boot, in ticks.
#[derive(Debug, Clone, Copy)]
pub struct CpuSample {
    /// Neither idle nor waiting for disks.
    pub busy: u64,
    /// All of it.
    pub total: u64,
}
