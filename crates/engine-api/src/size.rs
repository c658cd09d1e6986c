//! Size of a sandbox.

use serde::{Deserialize, Serialize};

/// Resources of one sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSize {
    /// Virtual CPUs, 1 to 8.
    pub vcpus: u8,
    /// Memory in MiB, 128 to 65,536.
    pub memory_mib: u32,
    /// Writable disk in MiB, 64 or more.
    pub disk_mib: u64,
}

impl SandboxSize {
    /// Most virtual CPUs.
    pub const MAX_VCPUS: u8 = 8;
    /// Least memory in MiB.
    pub const MIN_MEMORY_MIB: u32 = 128;
    /// Most memory in MiB.
    pub const MAX_MEMORY_MIB: u32 = 65_536;
    /// Least disk in MiB.
    pub const MIN_DISK_MIB: u64 = 64;
    /// Most disk in MiB (1 TiB).
    pub const MAX_DISK_MIB: u64 = 1 << 20;

    /// Checks every bound.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Too few or too many vCPUs.
    #[error("{0} vCPUs asked for: a sandbox has 1 to {max}", max = SandboxSize::MAX_VCPUS)]
    Vcpus(u8),
    /// Too little or too much memory.
    #[error(
        "{0} MiB of memory asked for: a sandbox needs at least {min} MiB and can have {max} MiB",
        min = SandboxSize::MIN_MEMORY_MIB,
        max = SandboxSize::MAX_MEMORY_MIB
    )]
    Memory(u32),
    /// Too small or too large a disk.
    #[error(
        "{0} MiB of disk asked for: a sandbox needs at least {min} MiB and can have {max} MiB",
        min = SandboxSize::MIN_DISK_MIB,
        max = SandboxSize::MAX_DISK_MIB
    )]
    Disk(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bound_is_enforced_and_named() {
        let good = SandboxSize::default();
        assert_eq!(good.check(), Ok(()));
        let with = |vcpus, memory_mib, disk_mib| SandboxSize {
            vcpus,
            memory_mib,
            disk_mib,
        };
        assert_eq!(with(0, 512, 1024).check(), Err(SizeError::Vcpus(0)));
        assert_eq!(with(9, 512, 1024).check(), Err(SizeError::Vcpus(9)));
        assert_eq!(with(1, 127, 1024).check(), Err(SizeError::Memory(127)));
        assert_eq!(
            with(1, 65_537, 1024).check(),
            Err(SizeError::Memory(65_537))
        );
        let error = with(1, 512, 63).check().unwrap_err();
        assert!(error.to_string().contains("63 MiB of disk"));
    }
}
