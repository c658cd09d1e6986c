//! File mapped into memory. The file offset is never used, because other VMs that boot at the same
//! time may share the open file.

use crate::error::VmmError;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

/// File mapped for reading. The file must not shrink while it is mapped: a read beyond its end
/// would kill the process with SIGBUS.
pub struct MappedFile {
    start: NonNull<libc::c_void>,
    length: NonZeroUsize,
}

impl MappedFile {
    /// Maps a file of 1 to `limit` bytes. `what` names the file in errors.
    pub fn new(file: &File, limit: u64, what: &'static str) -> Result<Self, VmmError> {
        let bytes = file.metadata().map_err(|e| VmmError::host(what, e))?.len();
        let length = usize::try_from(bytes)
            .ok()
            .and_then(NonZeroUsize::new)
            .filter(|_| bytes <= limit)
            .ok_or_else(|| {
                VmmError::Config(format!("{what} of {bytes} bytes: must be 1 to {limit}"))
            })?;
        // SAFETY: a new private mapping at an address chosen by the kernel.
        let start = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ,
                // Populate the mapping at once: the whole file is copied next, and otherwise each
                // page would cause a fault.
                MapFlags::MAP_PRIVATE | MapFlags::MAP_POPULATE,
                file,
                0,
            )
        }
        .map_err(|e| VmmError::host(what, e))?;
        Ok(Self { start, length })
    }

    /// Returns the content of the file.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable, has this length, and exists as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.length.get()) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: unmaps the mapping from `new` once.
        unsafe {
            let _ = munmap(self.start, self.length.get());
        }
    }
}
