//! [`HostLimits`]: limits that the operator sets (`jiffy serve --max-sandboxes` and others). The
//! admission of each guest compares the reservations with them.

use super::Pressure;

/// Limits of the use of a host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HostLimits {
    /// Maximum number of running sandboxes. `None`: limited by the other resources only.
    pub sandboxes: Option<usize>,
    /// Maximum sum of the memory sizes of all guests, in multiples of the host's memory. An idle
    /// guest holds 2 to 12 MiB of its 512 MiB, so counting the full size would leave a host empty.
    /// With 8, the host is full once each guest uses an eighth of its memory, five times the memory
    /// of an idle guest. If guests grow at once, the reserve and the limits of memory pressure stop
    /// further admissions.
    pub memory_overcommit: f64,
    /// Memory that must stay available, in MiB. Defaults to the larger of 512 MiB and 5 % of the
    /// host's memory.
    pub reserve_memory_mib: Option<u64>,
    /// Disk space that must stay free, in MiB. Defaults to the larger of 1,024 MiB and 1 % of the
    /// disk.
    pub reserve_disk_mib: Option<u64>,
    /// Maximum sum of the disk sizes of all guests, in multiples of the free space without the
    /// reserve. A guest writes a few MiB of its 10,240 MiB, so counting the full size would leave a
    /// host empty. With 1, all admitted guests can fill their disks. With more, guests that fill
    /// their disks at once can fill the host's disk.
    pub disk_overcommit: f64,
    /// Pressure (stall times of the kernel, PSI) above which no operation starts, in percent of the
    /// last ten seconds. Memory pressure counts only while less than a quarter of the host's memory
    /// is available. Waiting for processors slows all sandboxes down but breaks none, so by default
    /// CPU pressure rejects no request.
    pub pressure: Pressure,
}

impl Default for HostLimits {
    fn default() -> Self {
        Self {
            sandboxes: None,
            memory_overcommit: 8.0,
            reserve_memory_mib: None,
            reserve_disk_mib: None,
            disk_overcommit: 256.0,
            pressure: Pressure {
                // The limit is never exceeded, so CPU pressure rejects no request.
                cpu_some: 100.0,
                memory_some: 40.0,
                memory_full: 10.0,
                io_full: 90.0,
            },
        }
    }
}
