//! Resources that a guest uses, as its engine measures them from the host.

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

/// Counters of a guest from which its owner's usage is computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuestCounters {
    /// CPU time of the isolating process in microseconds since its start.
    pub cpu_us: u64,
    /// Bytes sent over the network since the guest started. `None` if unknown.
    pub sent_bytes: Option<u64>,
}

impl From<GuestUsage> for GuestCounters {
    fn from(usage: GuestUsage) -> Self {
        Self {
            cpu_us: usage.cpu_us,
            sent_bytes: usage.net_bytes.map(|(sent, _)| sent),
        }
    }
}
