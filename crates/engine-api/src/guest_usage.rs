//! Resources that a guest uses.

/// Resource usage of a guest on its host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuestUsage {
    /// CPU time of the isolating process in microseconds since its start.
    pub cpu_us: u64,
    /// Private memory in bytes.
    pub memory_bytes: u64,
    /// Bytes written to the disk since the last snapshot. `None` if unknown.
    pub disk_bytes: Option<u64>,
    /// Bytes sent and received over the network since the guest started. `None` without a network.
    pub net_bytes: Option<(u64, u64)>,
}
