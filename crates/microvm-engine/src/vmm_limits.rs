//! Control group limits of one VMM process.

use jiffy_confinement::GroupLimits;

/// Maximum number of threads and processes of one VMM: vCPUs, event loop, snapshot writers.
const MAX_TASKS: u64 = 64;
/// Memory of a VMM in addition to the guest's memory, in bytes. Measured: 0.4 MiB for the process,
/// plus the kernel's tables for KVM.
const MEMORY_OVERHEAD_BYTES: u64 = 128 << 20;

/// Limits of one VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VmmLimits {
    /// Memory of the guest, in bytes.
    pub memory: u64,
}

impl From<VmmLimits> for GroupLimits {
    fn from(limits: VmmLimits) -> Self {
        // A snapshot writer shares memory with its guest copy-on-write. In the worst case, both
        // together need twice the guest's memory.
        let memory = limits.memory.saturating_mul(2);
        Self {
            memory_bytes: memory.saturating_add(MEMORY_OVERHEAD_BYTES),
            max_tasks: MAX_TASKS,
            swap: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_may_use_memory_for_its_guest_and_a_copy_and_few_tasks() {
        let limits = GroupLimits::from(VmmLimits { memory: 1 << 30 });
        assert_eq!(limits.memory_bytes, (2 << 30) + MEMORY_OVERHEAD_BYTES);
        assert_eq!(limits.max_tasks, 64);
    }
}
