//! Layout of guest memory, in guest-physical addresses and in the process.
//!
//! ```text
//! 0 ............ 3 GiB   RAM, at most 3 GiB
//! 0xd000_0000 ...        virtio-mmio devices, one page of 4 KiB each
//! 0xe000_0000            page for dropping shadow page tables; no memory while a guest runs
//! 0xfec0_0000            I/O APIC
//! 0xfee0_0000            local APIC
//! 0xfffb_c000            four pages of KVM: identity map, TSS
//! 4 GiB ...              RAM beyond the first 3 GiB
//! ```

use crate::GuestMemory;
use crate::error::VmmError;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous};
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

/// End of low guest RAM. The remaining RAM is above 4 GiB.
pub const LOW_RAM_END: u64 = 3 << 30;
/// Start of RAM above the hole.
pub const HIGH_RAM_START: u64 = 4 << 30;
/// Address of the first virtio-mmio page.
pub const MMIO_START: u64 = 0xd000_0000;
/// Size of the register page of a virtio-mmio device, in bytes.
pub const MMIO_STRIDE: u64 = 0x1000;
/// Page that is registered with KVM as a memory slot and removed again at once, while no guest
/// runs. The removal of any slot makes KVM drop its shadow page tables, which is necessary after
/// the VMM has replaced guest memory (`memory_slots::drop_shadows`).
pub const UNSEEN_PAGE_START: u64 = 0xe000_0000;
/// I/O APIC registers (Intel 82093AA).
pub const IOAPIC_START: u64 = 0xfec0_0000;
/// Local APIC registers.
pub const LAPIC_START: u64 = 0xfee0_0000;
/// Three pages that KVM requires on Intel hosts (`KVM_SET_TSS_ADDR`).
pub const KVM_TSS_START: u64 = 0xfffb_d000;
/// Page that KVM requires on Intel hosts (`KVM_SET_IDENTITY_MAP_ADDR`).
pub const KVM_IDENTITY_MAP_START: u64 = 0xfffb_c000;

/// Size of a huge page, in bytes.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Returns the RAM ranges (start and length in bytes) of a guest with `mib` MiB.
pub fn layout(mib: u32) -> Vec<(u64, u64)> {
    let total = u64::from(mib) << 20;
    let low = total.min(LOW_RAM_END);
    let mut ranges = vec![(0, low)];
    if total > low {
        ranges.push((HIGH_RAM_START, total - low));
    }
    ranges
}

/// Maps zeroed memory of `mib` MiB. Alignment and advice enable huge pages.
pub fn allocate(mib: u32) -> Result<GuestMemory, VmmError> {
    let mut regions = Vec::new();
    for (start, length) in layout(mib) {
        let length = usize::try_from(length)
            .map_err(|_| VmmError::host("memory", "too large for this host"))?;
        let pointer = reserve(length)?;
        // SAFETY: `pointer` starts a private anonymous mapping of `length` bytes, which is not used
        // elsewhere and is mapped until the process exits.
        let mapping = unsafe {
            MmapRegion::build_raw(
                pointer.as_ptr().cast(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            )
        }
        .map_err(|e| VmmError::host("guest memory", e))?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(start))
            .ok_or_else(|| VmmError::host("guest memory", "address overflow"))?;
        regions.push(region);
    }
    GuestMemory::from_regions(regions).map_err(|e| VmmError::host("guest memory", e))
}

/// Maps `length` bytes of zeroed memory at a multiple of the size of a huge page.
fn reserve(length: usize) -> Result<NonNull<libc::c_void>, VmmError> {
    // The padding is never accessed, so it uses only address space.
    let padded = NonZeroUsize::new(length + HUGE_PAGE_BYTES)
        .ok_or_else(|| VmmError::host("guest memory", "the configured size is 0"))?;
    // SAFETY: a new anonymous mapping at an address chosen by the kernel.
    let raw = unsafe {
        mmap_anonymous(
            None,
            padded,
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            // `MAP_NORESERVE`: guests may have more memory in total than the host.
            MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE,
        )
    }
    .map_err(|e| VmmError::host("mmap of guest memory", e))?;
    let skip = raw.as_ptr().align_offset(HUGE_PAGE_BYTES);
    // SAFETY: `skip` is below HUGE_PAGE_BYTES, so the result and the following `length` bytes are
    // inside the padded mapping.
    let aligned = unsafe { raw.byte_add(skip) };
    // SAFETY: advice for a range of a mapping owned by this function.
    if let Err(e) = unsafe { madvise(aligned, length, MmapAdvise::MADV_HUGEPAGE) } {
        // Kernels without huge pages return EINVAL. Accesses to memory are then slower.
        if e != nix::errno::Errno::EINVAL {
            return Err(VmmError::host("madvise of guest memory", e));
        }
    }
    Ok(aligned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{Bytes, GuestMemoryBackend};

    #[test]
    fn memory_beyond_three_gib_is_above_the_device_hole() {
        assert_eq!(layout(512), [(0, 512 << 20)]);
        assert_eq!(layout(3072), [(0, 3 << 30)]);
        assert_eq!(layout(65_536), [(0, 3 << 30), (4 << 30, 61 << 30)]);
    }

    #[test]
    fn allocated_memory_is_zero_writable_and_huge_page_aligned() {
        let memory = allocate(128).unwrap();
        assert_eq!(memory.read_obj::<u64>(GuestAddress(0x1000)).unwrap(), 0);
        memory
            .write_obj(7u8, GuestAddress((128 << 20) - 1))
            .unwrap();
        assert!(memory.write_obj(7u8, GuestAddress(128 << 20)).is_err());
        let host = memory.get_host_address(GuestAddress(0)).unwrap();
        assert_eq!(host.align_offset(HUGE_PAGE_BYTES), 0);
    }
}
