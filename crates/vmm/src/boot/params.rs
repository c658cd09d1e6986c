//! The zero page (Linux Documentation/arch/x86/zero-page.rst) and the kernel command line.

use crate::GuestMemory;
use crate::error::VmmError;
use crate::memory::HIGH_RAM_START;
use jiffy_proto::vm::limits::MAX_CMDLINE;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// Guest-physical address of the zero page.
pub const ZERO_PAGE_START: u64 = 0x7000;
/// Address of the command line.
const CMDLINE_START: u64 = 0x2_0000;
/// End of conventional memory, followed by the MP table.
pub(super) const EBDA_START: u64 = 0x9_fc00;
const EBDA_LENGTH: u64 = 0x400;
/// Start of memory above the firmware area.
const HIGH_MEMORY: u64 = 0x10_0000;

/// Types of entries in the map of memory.
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

// Values of the setup header (Linux Documentation/arch/x86/boot.rst). The magic is "HdrS".
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448;
const LOADER_UNKNOWN: u8 = 0xff;
const KERNEL_ALIGNMENT: u32 = 0x0100_0000;

/// Writes the command line and the zero page.
pub(super) fn write(
    memory: &GuestMemory,
    cmdline: &str,
    initrd: Option<(u64, u64)>,
) -> Result<(), VmmError> {
    if cmdline.len() >= MAX_CMDLINE || cmdline.bytes().any(|b| b == 0) {
        return Err(VmmError::Config(format!(
            "kernel command line of {} bytes: at most {} and no NUL",
            cmdline.len(),
            MAX_CMDLINE - 1
        )));
    }
    let mut text = cmdline.as_bytes().to_vec();
    text.push(0);
    let placed = |e| VmmError::host("placing boot parameters", e);
    memory
        .write_slice(&text, GuestAddress(CMDLINE_START))
        .map_err(placed)?;

    let mut zero_page = boot_params::default();
    let header = &mut zero_page.hdr;
    header.type_of_loader = LOADER_UNKNOWN;
    header.boot_flag = BOOT_FLAG;
    header.header = HEADER_MAGIC;
    header.kernel_alignment = KERNEL_ALIGNMENT;
    header.cmd_line_ptr = low_u32(CMDLINE_START)?;
    header.cmdline_size = low_u32(text.len().try_into().unwrap_or(u64::MAX))?;
    if let Some((start, length)) = initrd {
        header.ramdisk_image = low_u32(start)?;
        header.ramdisk_size = low_u32(length)?;
    }
    let map = e820(memory);
    // The table has 128 entries and a machine has at most 4, so no entry is lost.
    for (slot, entry) in zero_page.e820_table.iter_mut().zip(&map) {
        *slot = *entry;
    }
    zero_page.e820_entries = u8::try_from(map.len()).unwrap_or(u8::MAX);
    memory
        .write_obj(zero_page, GuestAddress(ZERO_PAGE_START))
        .map_err(placed)
}

/// Returns the map of memory for the guest's kernel.
fn e820(memory: &GuestMemory) -> Vec<boot_e820_entry> {
    let entry = |addr, size, r#type| boot_e820_entry { addr, size, r#type };
    // The area between the MP table and 1 MiB is not listed, so the kernel does not use it.
    let mut map = vec![
        entry(0, EBDA_START, E820_RAM),
        entry(EBDA_START, EBDA_LENGTH, E820_RESERVED),
    ];
    for region in memory.iter() {
        // Memory below 1 MiB is listed above.
        let start = region.start_addr().0.max(HIGH_MEMORY);
        let end = region.start_addr().0 + region.len();
        debug_assert!(start == HIGH_MEMORY || start == HIGH_RAM_START);
        map.push(entry(start, end - start, E820_RAM));
    }
    map
}

/// Converts an address or size to a field of 32 bits.
fn low_u32(value: u64) -> Result<u32, VmmError> {
    u32::try_from(value).map_err(|_| VmmError::host("boot parameters", "address above 4 GiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_map_covers_all_ram_except_the_firmware_area() {
        let memory = GuestMemory::from_ranges(&[
            (GuestAddress(0), 4 << 20),
            (GuestAddress(4 << 30), 2 << 20),
        ])
        .unwrap();
        let map = e820(&memory);
        let ram: u64 = map
            .iter()
            .filter(|e| e.r#type == E820_RAM)
            .map(|e| e.size)
            .sum();
        assert_eq!(ram, (6 << 20) - (HIGH_MEMORY - EBDA_START));
    }

    #[test]
    fn a_command_line_that_is_too_long_is_rejected() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
        let long = "x".repeat(MAX_CMDLINE);
        assert!(matches!(
            write(&memory, &long, None),
            Err(VmmError::Config(_))
        ));
        write(&memory, "quiet", None).unwrap();
    }
}
