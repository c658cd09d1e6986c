//! Page tables and segments for the first instructions: the lowest 4 GiB mapped one to one with 2
//! MiB pages.

use crate::GuestMemory;
use crate::error::VmmError;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

/// Top-level page table.
pub const PML4_START: u64 = 0x9000;
/// Table of the second level, whose entries cover 1 GiB each.
const PDPT_START: u64 = 0xa000;
/// First of the tables of the third level, whose entries map 2 MiB each.
const PD_START: u64 = 0xb000;
/// Bits of an entry: present (0) and writable (1).
const PRESENT_WRITABLE: u64 = 0x3;
/// Bit of an entry that maps a page of 2 MiB.
const LARGE_PAGE: u64 = 0x80;
const MAPPED_GIB: u64 = 4;

/// Descriptor table of the boot CPU.
pub struct BootGdt {
    /// Guest-physical address.
    pub start: u64,
    /// Descriptors, index = selector / 8.
    pub entries: [u64; 5],
}

/// Null, null, 64-bit code (0x10), data (0x18), task state (0x20), as in the Linux boot protocol.
pub const BOOT_GDT: BootGdt = BootGdt {
    start: 0x500,
    entries: [
        0,
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x008f_8b00_0000_ffff,
    ],
};

/// Writes page tables and segment descriptors.
pub(super) fn write(memory: &GuestMemory) -> Result<(), VmmError> {
    write_tables(memory).map_err(|e| VmmError::host("placing boot page tables", e))
}

/// Writes page tables that map the first 4 GiB of addresses to themselves, and the GDT.
fn write_tables(memory: &GuestMemory) -> Result<(), GuestMemoryError> {
    // One PML4 entry and four PDPT entries are sufficient for 4 GiB. Each page directory maps 1
    // GiB.
    memory.write_obj(PDPT_START | PRESENT_WRITABLE, GuestAddress(PML4_START))?;
    for gib in 0..MAPPED_GIB {
        memory.write_obj(
            (PD_START + gib * 0x1000) | PRESENT_WRITABLE,
            GuestAddress(PDPT_START + gib * 8),
        )?;
        let mut table = Vec::with_capacity(4096);
        for entry in 0..512u64 {
            let address = (gib << 30) | (entry << 21);
            table.extend((address | PRESENT_WRITABLE | LARGE_PAGE).to_le_bytes());
        }
        memory.write_slice(&table, GuestAddress(PD_START + gib * 0x1000))?;
    }
    for (at, entry) in (BOOT_GDT.start..).step_by(8).zip(BOOT_GDT.entries) {
        memory.write_obj(entry, GuestAddress(at))?;
    }
    Ok(())
}
