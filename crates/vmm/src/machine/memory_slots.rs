//! Registration of guest memory with KVM, as memory slots.
//!
//! A guest has one slot below 4 GiB and, with more than 3 GiB of memory, one above.

use crate::GuestMemory;
use crate::error::VmmError;
use crate::memory::UNSEEN_PAGE_START;
use jiffy_proto::layer::MEMORY_PAGE;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

/// Registers all guest memory. The kernel creates tables for it, which takes 0.3 ms for 512 MiB.
pub fn register(vm: &VmFd, memory: &GuestMemory) -> Result<(), VmmError> {
    set_all(vm, memory, true)
}

/// Unregisters all guest memory.
pub fn unregister(vm: &VmFd, memory: &GuestMemory) -> Result<(), VmmError> {
    set_all(vm, memory, false)
}

/// Makes KVM drop all shadow page tables.
///
/// Without hardware support for nested page tables, KVM shadows the guest's page tables. It detects
/// only changes by the guest's own writes. KVM drops all shadows when any memory slot is removed
/// (`KVM_X86_QUIRK_SLOT_ZAP_ALL`). Removing a slot of one page is faster than removing and adding
/// all memory.
pub fn drop_shadows(vm: &VmFd, memory: &GuestMemory) -> Result<(), VmmError> {
    // Any valid host address is suitable: no guest runs while the slot exists.
    let page = memory
        .get_host_address(GuestAddress(0))
        .map_err(|e| VmmError::host("guest memory", e))?;
    // The first slot number that no region of guest memory uses.
    let slot = u32::try_from(memory.num_regions()).unwrap_or(u32::MAX);
    // A size of 0 removes the slot again.
    for bytes in [u64::from(MEMORY_PAGE), 0] {
        set(vm, slot, UNSEEN_PAGE_START, bytes, page)?;
    }
    Ok(())
}

/// Adds guest memory to the VM if `present` is true, or removes it.
fn set_all(vm: &VmFd, memory: &GuestMemory, present: bool) -> Result<(), VmmError> {
    for (slot, region) in (0u32..).zip(memory.iter()) {
        let host = region
            .get_host_address(MemoryRegionAddress(0))
            .map_err(|e| VmmError::host("guest memory", e))?;
        let bytes = if present { region.len() } else { 0 };
        set(vm, slot, region.start_addr().0, bytes, host)?;
    }
    Ok(())
}

/// Registers `bytes` bytes of guest memory at the host address `host`, or unregisters the slot if
/// `bytes` is 0.
fn set(vm: &VmFd, slot: u32, start: u64, bytes: u64, host: *mut u8) -> Result<(), VmmError> {
    let slot = kvm_userspace_memory_region {
        slot,
        guest_phys_addr: start,
        memory_size: bytes,
        // The conversion cannot fail: addresses have 64 bits.
        userspace_addr: u64::try_from(host.addr()).unwrap_or(0),
        flags: 0,
    };
    // SAFETY: callers pass guest memory, which is mapped until the process exits, and thus longer
    // than the VM exists.
    unsafe { vm.set_user_memory_region(slot) }
        .map_err(|e| VmmError::host("KVM_SET_USER_MEMORY_REGION", e))
}
