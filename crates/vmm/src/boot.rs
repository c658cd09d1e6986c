//! Direct boot of an ELF kernel in 64-bit mode: writes guest memory before the first instruction.

mod mapped_file;
mod mptable;
mod paging;
mod params;

pub use paging::{BOOT_GDT, BootGdt, PML4_START};
pub use params::ZERO_PAGE_START;

use crate::GuestMemory;
use crate::error::VmmError;
use linux_loader::loader::{Elf, KernelLoader};
use mapped_file::MappedFile;
use std::fs::File;
use std::io::Cursor;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend};

/// Top of the boot stack, which the kernel uses only briefly.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Minimum load address of kernels. Memory from 1 MiB on contains no firmware tables.
const HIGH_MEMORY: u64 = 0x10_0000;
/// Maximum size of a kernel image, in bytes.
const MAX_KERNEL_BYTES: u64 = 256 << 20;
/// Maximum size of an initial RAM file system, in bytes.
const MAX_INITRD_BYTES: u64 = 256 << 20;

/// Loads kernel, initrd and boot tables. Returns the address of the kernel's 64-bit entry point.
pub fn load(
    memory: &GuestMemory,
    kernel: &File,
    initrd: Option<&File>,
    cmdline: &str,
    vcpus: u8,
) -> Result<u64, VmmError> {
    let kernel = MappedFile::new(kernel, MAX_KERNEL_BYTES, "kernel")?;
    let mut image = Cursor::new(kernel.bytes());
    let loaded = Elf::load(memory, None, &mut image, Some(GuestAddress(HIGH_MEMORY)))
        .map_err(|e| VmmError::Config(format!("kernel image is not a bootable ELF: {e}")))?;
    let initrd = initrd
        .map(|file| load_initrd(memory, file, loaded.kernel_end))
        .transpose()?;
    // These tables are below 1 MiB, so they cannot overlap the kernel and the initrd.
    params::write(memory, cmdline, initrd)?;
    mptable::write(memory, vcpus)?;
    paging::write(memory)?;
    // `kernel_load` is the entry point of the ELF file.
    Ok(loaded.kernel_load.raw_value())
}

/// Copies the initial RAM file system to the end of low memory. Returns its address and length.
fn load_initrd(memory: &GuestMemory, file: &File, kernel_end: u64) -> Result<(u64, u64), VmmError> {
    let content = MappedFile::new(file, MAX_INITRD_BYTES, "initrd")?;
    let length = u64::try_from(content.bytes().len()).unwrap_or(u64::MAX);
    let low_end = memory
        .find_region(GuestAddress(0))
        .map(vm_memory::GuestMemoryRegion::len)
        .unwrap_or(0);
    // The initrd starts at the highest page boundary from which it fits into low memory.
    let start = low_end
        .checked_sub(length)
        .map(|s| s & !0xfff)
        .filter(|&s| s > kernel_end)
        .ok_or_else(|| {
            VmmError::Config("guest memory too small for kernel and initrd".to_owned())
        })?;
    memory
        .write_slice(content.bytes(), GuestAddress(start))
        .map_err(|e| VmmError::host("placing the initrd", e))?;
    Ok((start, length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom, Write};

    fn file(content: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file
    }

    #[test]
    fn a_shared_file_offset_does_not_matter() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
        let mut initrd = file(&[7; 5000]);
        for position in [0, 5000] {
            initrd.seek(SeekFrom::Start(position)).unwrap();
            let (start, length) = load_initrd(&memory, &initrd, 1 << 20).unwrap();
            assert_eq!((start, length), ((4 << 20) - 8192, 5000));
            assert_eq!(
                memory.read_obj::<u8>(GuestAddress(start + 4999)).unwrap(),
                7
            );
        }
    }

    #[test]
    fn an_oversized_file_and_a_file_without_a_kernel_are_rejected() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let refused = |r: Result<u64, VmmError>| matches!(r, Err(VmmError::Config(_)));
        assert!(refused(load(&memory, &file(b"not an ELF"), None, "", 1)));
        assert!(refused(load(&memory, &file(b""), None, "", 1)));
        let large = file(&vec![0; 2 << 20]);
        assert!(matches!(
            load_initrd(&memory, &large, 0),
            Err(VmmError::Config(_))
        ));
    }
}
