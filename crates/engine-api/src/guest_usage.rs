//! Resources that a guest uses.

/// Resource usage of a guest on its host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuestUsage {
    /// CPU time of the isolating process in microseconds since its start.
    pub cpu_us: u64,
    /// Private memory in bytes.
    pub memory_bytes: u64,
    /// Bytes written to its disk since its last snapshot. `None` while they are unknown.
    pub disk_bytes: Option<u64>,
    /// Bytes sent and received over its network since it came up; none: it has no network.
    pub net_bytes: Option<(u64, u64)>,
}
