//! [`Resources`]: processor time, memory and disk space of a host or sandbox.
//!
//! The scheduler selects a host by them.

/// Amounts of the resources that limit the number of sandboxes of a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resources {
    /// Processor time in thousandths of a processor.
    pub cpu_milli: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Disk space in MiB.
    pub disk_mib: u32,
}

/// A kind of resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Processor time in thousandths of a processor.
    Cpu,
    /// Memory in MiB.
    Memory,
    /// Disk space in MiB.
    Disk,
}

impl Resource {
    /// All kinds, in the order in which a missing resource is reported.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Cpu, Self::Disk];

    /// Name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "processor time",
            Self::Memory => "memory",
            Self::Disk => "disk space",
        }
    }

    /// Unit in messages.
    #[must_use]
    pub fn unit(self) -> &'static str {
        match self {
            Self::Cpu => "thousandths of a processor",
            Self::Memory | Self::Disk => "MiB",
        }
    }
}

impl Resources {
    /// Returns the amount of one resource.
    #[must_use]
    pub fn get(&self, resource: Resource) -> u32 {
        match resource {
            Resource::Cpu => self.cpu_milli,
            Resource::Memory => self.memory_mib,
            Resource::Disk => self.disk_mib,
        }
    }

    /// Returns the first resource of which `self` is less than `needs`. `None` if `needs` fits.
    #[must_use]
    pub fn missing(&self, needs: &Self) -> Option<Resource> {
        Resource::ALL
            .into_iter()
            .find(|&r| self.get(r) < needs.get(r))
    }

    /// Returns the sum. Saturates at the maximum.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.saturating_add(other.cpu_milli),
            memory_mib: self.memory_mib.saturating_add(other.memory_mib),
            disk_mib: self.disk_mib.saturating_add(other.disk_mib),
        }
    }

    /// Returns the difference. Amounts below zero become zero.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.saturating_sub(other.cpu_milli),
            memory_mib: self.memory_mib.saturating_sub(other.memory_mib),
            disk_mib: self.disk_mib.saturating_sub(other.disk_mib),
        }
    }
}
