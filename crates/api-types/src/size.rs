//! Size of a sandbox.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Resources of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SandboxSize {
    /// Virtual CPUs.
    #[schemars(range(min = 1, max = SandboxSize::MAX_VCPUS))]
    pub vcpus: u8,
    /// Memory in MiB.
    #[schemars(range(min = SandboxSize::MIN_MEMORY_MIB, max = SandboxSize::MAX_MEMORY_MIB))]
    pub memory_mib: u32,
    /// Writable disk in MiB.
    #[schemars(range(min = SandboxSize::MIN_DISK_MIB, max = SandboxSize::MAX_DISK_MIB))]
    pub disk_mib: u64,
}

impl SandboxSize {
    /// Maximum number of virtual CPUs.
    pub const MAX_VCPUS: u8 = 8;
    /// Minimum memory in MiB.
    pub const MIN_MEMORY_MIB: u32 = 128;
    /// Maximum memory in MiB.
    pub const MAX_MEMORY_MIB: u32 = 65_536;
    /// Minimum disk in MiB.
    pub const MIN_DISK_MIB: u64 = 64;
    /// Maximum disk in MiB (1 TiB).
    pub const MAX_DISK_MIB: u64 = 1 << 20;

    /// Checks all bounds.
    pub fn check(&self) -> Result<(), SizeError> {
        if !(1..=Self::MAX_VCPUS).contains(&self.vcpus) {
            return Err(SizeError::Vcpus(self.vcpus));
        }
        if !(Self::MIN_MEMORY_MIB..=Self::MAX_MEMORY_MIB).contains(&self.memory_mib) {
            return Err(SizeError::Memory(self.memory_mib));
        }
        if !(Self::MIN_DISK_MIB..=Self::MAX_DISK_MIB).contains(&self.disk_mib) {
            return Err(SizeError::Disk(self.disk_mib));
        }
        Ok(())
    }
}

impl Default for SandboxSize {
    fn default() -> Self {
        Self {
            vcpus: 2,
            memory_mib: 512,
            disk_mib: 1024,
        }
    }
}

/// Size out of bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeError {
    /// Number of vCPUs.
    Vcpus(u8),
    /// Memory in MiB.
    Memory(u32),
    /// Disk in MiB.
    Disk(u64),
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vcpus(count) => write!(
                f,
                "{count} vCPUs requested: a sandbox can have 1 to {}",
                SandboxSize::MAX_VCPUS
            ),
            Self::Memory(mib) => write!(
                f,
                "{mib} MiB of memory requested: a sandbox needs at least {} MiB and can have at most \
                 {} MiB",
                SandboxSize::MIN_MEMORY_MIB,
                SandboxSize::MAX_MEMORY_MIB
            ),
            Self::Disk(mib) => write!(
                f,
                "{mib} MiB of disk requested: a sandbox needs at least {} MiB and can have at most {} \
                 MiB",
                SandboxSize::MIN_DISK_MIB,
                SandboxSize::MAX_DISK_MIB
            ),
        }
    }
}

impl std::error::Error for SizeError {}
