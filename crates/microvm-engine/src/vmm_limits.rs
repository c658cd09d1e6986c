//! Limits of VMMs by control groups.

use jiffy_confinement::GroupLimits;

/// Threads and processes of one VMM: vCPUs, event loop, writers of snapshots.
const MAX_TASKS: u64 = 64;
/// Memory of a VMM besides its guest's, in bytes; measured are 0.4 MiB of its own and the kernel's
/// tables for KVM.
const MEMORY_OVERHEAD_BYTES: u64 = 128 << 20;

/// Limits of one VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VmmLimits {
    /// Memory of the guest in bytes.
    pub memory: u64,
}

impl From<VmmLimits> for GroupLimits {
    fn from(limits: VmmLimits) -> Self {
        // The writer of a snapshot shares memory with its guest copy-on-write: the worst case is
        // twice the guest.
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
