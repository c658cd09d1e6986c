//! MP table: processors and interrupt pins (Intel MultiProcessor Specification 1.4, chapter 4).

use super::params::EBDA_START;
use crate::GuestMemory;
use crate::error::VmmError;
use crate::machine::ioapic::IOAPIC_PINS;
use crate::memory::{IOAPIC_START, LAPIC_START};
use vm_memory::{Bytes, GuestAddress};

/// Version 1.4 of the specification.
const SPEC_REVISION: u8 = 4;
const FLOATING_POINTER_LENGTH: usize = 16;
const HEADER_LENGTH: usize = 44;
/// Versions of the local APICs, and of the I/O APIC (82093AA).
const APIC_VERSION: u8 = 0x14;
const IOAPIC_VERSION: u8 = 0x11;
/// Flags of a processor: it is usable, and it boots the machine.
const CPU_ENABLED: u8 = 1;
const CPU_BOOT: u8 = 2;
/// Family 6 of x86 processors.
const CPU_SIGNATURE: u32 = 0x600;
/// Features of a processor: bit 0 is the FPU, bit 9 is the local APIC.
const CPU_FEATURES_APIC_FPU: u32 = 0x201;
/// Id of the only bus.
const ISA_BUS: u8 = 0;

/// Writes the floating pointer, followed by the table, at the end of conventional memory.
pub(super) fn write(memory: &GuestMemory, vcpus: u8) -> Result<(), VmmError> {
    let table_start = EBDA_START + 16;
    let mut bytes = floating_pointer(table_start)?;
    bytes.extend(table(vcpus));
    memory
        .write_slice(&bytes, GuestAddress(EBDA_START))
        .map_err(|e| VmmError::host("placing the MP table", e))
}

/// Sets the byte at `at` so that the sum of all bytes is zero.
fn set_checksum(bytes: &mut [u8], at: usize) {
    let sum = bytes.iter().fold(0u8, |sum, &b| sum.wrapping_add(b));
    bytes[at] = bytes[at].wrapping_sub(sum);
}

/// Returns the structure by which a kernel finds the MP table at address `table`.
fn floating_pointer(table: u64) -> Result<Vec<u8>, VmmError> {
    let address = u32::try_from(table).map_err(|e| VmmError::host("MP table address", e))?;
    let mut p = vec![0u8; FLOATING_POINTER_LENGTH];
    p[..4].copy_from_slice(b"_MP_");
    p[4..8].copy_from_slice(&address.to_le_bytes());
    // Length of the structure, in units of 16 bytes.
    p[8] = 1;
    p[9] = SPEC_REVISION;
    set_checksum(&mut p, 10);
    Ok(p)
}

/// Returns the configuration table of the MultiProcessor Specification 1.4.
fn table(vcpus: u8) -> Vec<u8> {
    // The APIC ids of the processors are `0..vcpus`, so the I/O APIC has the next id.
    let ioapic_id = vcpus;
    let mut entries: Vec<u8> = Vec::new();
    let mut count = 0u16;
    for id in 0..vcpus {
        // Processor entry (type 0).
        let flags = CPU_ENABLED | if id == 0 { CPU_BOOT } else { 0 };
        entries.extend([0, id, APIC_VERSION, flags]);
        entries.extend(CPU_SIGNATURE.to_le_bytes());
        entries.extend(CPU_FEATURES_APIC_FPU.to_le_bytes());
        entries.extend([0; 8]);
        count += 1;
    }
    // Bus entry (type 1), then I/O APIC entry (type 2), which is enabled (1).
    entries.extend([1, ISA_BUS]);
    entries.extend(b"ISA   ");
    entries.extend([2, ioapic_id, IOAPIC_VERSION, 1]);
    entries.extend(low32(IOAPIC_START));
    count += 2;
    // Interrupt entries (type 3). Each pin carries the ISA interrupt with the same number. Flags
    // of 0 select the polarity and trigger mode of the ISA bus: edge-triggered.
    for pin in 0..IOAPIC_PINS {
        entries.extend([3, 0, 0, 0, ISA_BUS, pin, ioapic_id, pin]);
        count += 1;
    }
    // Local interrupt entries (type 4): external interrupts (3) at LINT0 of the boot processor, and
    // NMIs (1) at LINT1 of all processors.
    entries.extend([4, 3, 0, 0, ISA_BUS, 0, 0, 0]);
    entries.extend([4, 1, 0, 0, ISA_BUS, 0, 0xff, 1]);
    count += 2;

    // The header: signature, length, revision, checksum (byte 7), names of manufacturer and
    // product, number of entries, and address of the local APICs.
    let mut table = vec![0u8; HEADER_LENGTH];
    table[..4].copy_from_slice(b"PCMP");
    let length = u16::try_from(HEADER_LENGTH + entries.len()).unwrap_or(u16::MAX);
    table[4..6].copy_from_slice(&length.to_le_bytes());
    table[6] = SPEC_REVISION;
    table[8..16].copy_from_slice(b"JIFFY   ");
    table[16..28].copy_from_slice(b"MICROVM     ");
    table[34..36].copy_from_slice(&count.to_le_bytes());
    table[36..40].copy_from_slice(&low32(LAPIC_START));
    table.extend(entries);
    set_checksum(&mut table, 7);
    table
}

/// Returns the low half of an address.
fn low32(address: u64) -> [u8; 4] {
    let b = address.to_le_bytes();
    [b[0], b[1], b[2], b[3]]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0u8, |s, &b| s.wrapping_add(b))
    }

    #[test]
    fn checksums_are_valid_and_the_table_fits_its_area() {
        for vcpus in [1, 2, 8] {
            let table = table(vcpus);
            assert_eq!(sum(&table), 0);
            assert!(FLOATING_POINTER_LENGTH + table.len() <= 0x400);
            assert_eq!(
                usize::from(u16::from_le_bytes([table[4], table[5]])),
                table.len()
            );
        }
        assert_eq!(sum(&floating_pointer(EBDA_START + 16).unwrap()), 0);
    }
}
