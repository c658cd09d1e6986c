//! [`Shortage`]: if a guest is not admitted, the resource of which the host has too little.
//!
//! The *warm pool* has guests that were started in advance and wait for a create.

use std::time::Duration;

/// Resource of which the host has too little.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Shortage {
    /// The maximum number of sandboxes is running.
    Sandboxes,
    /// The sum of the guests' memory sizes has reached its limit.
    ReservedMemory,
    /// Too little memory is available.
    Memory,
    /// Tasks wait too long for memory, disks or processors.
    Pressure,
    /// Too little disk space is free.
    Disk,
    /// The sum of the guests' disk sizes has reached its limit.
    ReservedDisk,
    /// Too few tasks can be started.
    Tasks,
    /// Too few file descriptors can be opened.
    Descriptors,
    /// The sandbox is larger than the host.
    Size,
}

impl Shortage {
    /// Returns the name of the resource in the labels of metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sandboxes => "sandboxes",
            // Metrics of earlier versions have these names.
            Self::ReservedMemory => "promised_memory",
            Self::Memory => "available_memory",
            Self::Pressure => "pressure",
            Self::Disk => "disk",
            Self::ReservedDisk => "promised_disk",
            Self::Tasks => "tasks",
            Self::Descriptors => "descriptors",
            Self::Size => "size",
        }
    }

    /// Returns the time after which a retry is worthwhile. `None` if a retry cannot succeed.
    pub(crate) fn retry_after(self) -> Option<Duration> {
        match self {
            Self::Size => None,
            Self::Sandboxes | Self::ReservedMemory | Self::ReservedDisk | Self::Memory => {
                Some(Duration::from_secs(2))
            }
            // Pressure is an average over ten seconds.
            Self::Pressure | Self::Tasks | Self::Descriptors => Some(Duration::from_secs(5)),
            // Disk space is freed by background work.
            Self::Disk => Some(Duration::from_secs(30)),
        }
    }

    /// Returns whether stopping warm-pool guests frees the resource.
    pub(crate) fn is_freed_by_eviction(self) -> bool {
        matches!(
            self,
            Self::ReservedMemory | Self::ReservedDisk | Self::Memory
        )
    }
}
