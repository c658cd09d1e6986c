//! Direct boot of an ELF kernel in 64-bit mode: what has to lie in guest memory before the first instruction.

mod mptable;
mod paging;
mod params;

pub use paging::{BOOT_GDT, BootGdt, PML4_START};
pub use params::ZERO_PAGE_START;

use crate::GuestMemory;
use crate::error::VmmError;
use linux_loader::loader::{Elf, KernelLoader};
use std::fs::File;
use std::io::Read;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend};

/// Top of the boot stack; the kernel leaves it at once.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Where kernels are linked to at the lowest; 1 MiB and above is free of firmware tables.
const HIGH_MEMORY: u64 = 0x10_0000;
/// Largest initial RAM file system.
const MAX_INITRD: u64 = 256 << 20;

/// Loads everything and returns the address of the kernel's 64-bit entry.
pub fn load(
    memory: &GuestMemory,
    kernel: &mut File,
    initrd: Option<&mut File>,
    cmdline: &str,
    vcpus: u8,
) -> Result<u64, VmmError> {
    let loaded = Elf::load(memory, None, kernel, Some(GuestAddress(HIGH_MEMORY)))
        .map_err(|e| VmmError::Config(format!("kernel image is not a bootable ELF: {e}")))?;
    let initrd = initrd
        .map(|file| load_initrd(memory, file, loaded.kernel_end))
        .transpose()?;
    params::write(memory, cmdline, initrd)?;
    mptable::write(memory, vcpus)?;
    paging::write(memory)?;
    Ok(loaded.kernel_load.raw_value())
}

/// Puts the initial RAM file system at the end of low memory; returns (address, length).
fn load_initrd(
    memory: &GuestMemory,
    file: &mut File,
    kernel_end: u64,
) -> Result<(u64, u64), VmmError> {
    let length = file
        .metadata()
        .map_err(|e| VmmError::host("size of the initrd", e))?
        .len();
    if length == 0 || length > MAX_INITRD {
        return Err(VmmError::Config(format!(
            "initrd of {length} bytes: must be 1 to {MAX_INITRD}"
        )));
    }
    let low_end = memory
        .find_region(GuestAddress(0))
        .map(vm_memory::GuestMemoryRegion::len)
        .unwrap_or(0);
    let start = low_end
        .checked_sub(length)
        .map(|s| s & !0xfff)
        .filter(|&s| s > kernel_end)
        .ok_or_else(|| {
            VmmError::Config("guest memory too small for kernel and initrd".to_owned())
        })?;
    let mut content = Vec::new();
    file.take(length)
        .read_to_end(&mut content)
        .map_err(|e| VmmError::host("reading the initrd", e))?;
    memory
        .write_slice(&content, GuestAddress(start))
        .map_err(|e| VmmError::host("placing the initrd", e))?;
    Ok((start, length))
}
