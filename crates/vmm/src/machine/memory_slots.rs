//! Guest memory as KVM knows it: slots.

use crate::GuestMemory;
use crate::error::VmmError;
use crate::memory::UNSEEN_PAGE_START;
use jiffy_proto::layer::MEMORY_PAGE;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

/// Gives all guest memory to KVM. The kernel makes tables for it then: some 0.3 ms for 512 MiB.
pub fn give(vm: &VmFd, memory: &GuestMemory) -> Result<(), VmmError> {
    set_all(vm, memory, true)
}

/// Takes it away.
pub fn take(vm: &VmFd, memory: &GuestMemory) -> Result<(), VmmError> {
    set_all(vm, memory, false)
}

/// Has KVM drop all shadows of guest page tables.
///
/// Without hardware support for nested page tables, KVM shadows the guest's, and learns of changes
/// by the guest's own writes only. It drops all shadows when any memory is taken from it
/// (`KVM_X86_QUIRK_SLOT_ZAP_ALL`): of a page, which takes less time than taking all memory away and
/// giving it back.
pub fn drop_shadows(vm: &VmFd, memory: &GuestMemory) -> Result<(), VmmError> {
    let page = memory.get_host_address(GuestAddress(0));
    let page = page.map_err(|e| VmmError::host("guest memory", e))?;
    let slot = u32::try_from(memory.num_regions()).unwrap_or(u32::MAX);
    for bytes in [u64::from(MEMORY_PAGE), 0] {
        set(vm, slot, UNSEEN_PAGE_START, bytes, page)?;
    }
    Ok(())
}

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

/// Gives KVM `bytes` bytes of guest memory that begin at `host`; 0: takes them away.
fn set(vm: &VmFd, slot: u32, start: u64, bytes: u64, host: *mut u8) -> Result<(), VmmError> {
    let slot = kvm_userspace_memory_region {
        slot,
        guest_phys_addr: start,
        memory_size: bytes,
        userspace_addr: u64::try_from(host.addr()).unwrap_or(0),
        flags: 0,
    };
    // SAFETY: the callers pass guest memory, which is mapped for as long as the process lives, and
    // so longer than the VM.
    unsafe { vm.set_user_memory_region(slot) }
        .map_err(|e| VmmError::host("KVM_SET_USER_MEMORY_REGION", e))
}
