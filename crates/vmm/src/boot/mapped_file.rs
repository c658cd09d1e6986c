//! File mapped into memory. The shared file offset is never used: a descriptor from the host may
//! share it with other VMs that boot at the same time.

use crate::error::VmmError;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

/// File mapped for reading. It must not shrink meanwhile: the host has verified it.
pub struct MappedFile {
    start: NonNull<libc::c_void>,
    length: NonZeroUsize,
}

impl MappedFile {
    /// Maps a file of 1 to `limit` bytes; `what` names it in the error.
    pub fn new(file: &File, limit: u64, what: &'static str) -> Result<Self, VmmError> {
        let bytes = file.metadata().map_err(|e| VmmError::host(what, e))?.len();
        let length = usize::try_from(bytes)
            .ok()
            .and_then(NonZeroUsize::new)
            .filter(|_| bytes <= limit)
            .ok_or_else(|| {
                VmmError::Config(format!("{what} of {bytes} bytes: must be 1 to {limit}"))
            })?;
        // SAFETY: a fresh private mapping at an address the kernel chooses.
        let start = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ,
                MapFlags::MAP_PRIVATE | MapFlags::MAP_POPULATE,
                file,
                0,
            )
        }
        .map_err(|e| VmmError::host(what, e))?;
        Ok(Self { start, length })
    }

    /// Content of the file.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable, of this length, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.length.get()) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, unmapped once.
        unsafe {
            let _ = munmap(self.start, self.length.get());
        }
    }
}
