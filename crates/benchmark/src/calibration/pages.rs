//! Calibration of memory: costs of page faults and of copies on this host.

use super::{Cost, batches};
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::fs::File;
use std::io::{Seek, Write};
use std::num::NonZeroUsize;
use std::path::Path;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

/// Size of a page in bytes.
const PAGE: usize = 4096;
/// Number of pages touched per batch.
const PAGES: usize = 1024;
/// Number of bytes that the kernel maps around a faulting page of the page cache (fault-around).
const FAULT_AROUND: usize = 16 * PAGE;

/// Memory mapping, unmapped when this value is dropped.
pub(super) struct Mapping {
    start: NonNull<libc::c_void>,
    bytes: usize,
}

impl Mapping {
    /// Maps anonymous memory in small pages, none of which is populated.
    pub fn anonymous(bytes: usize) -> Result<Self, String> {
        let length = NonZeroUsize::new(bytes).ok_or("an empty mapping")?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE) }
            .map_err(|e| format!("mapping memory: {e}"))?;
        Self { start, bytes }.in_small_pages()
    }

    /// Maps a file privately, in small pages.
    fn of_file(file: &File, bytes: usize) -> Result<Self, String> {
        let length = NonZeroUsize::new(bytes).ok_or("an empty mapping")?;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ,
                MapFlags::MAP_PRIVATE,
                file,
                0,
            )
        }
        .map_err(|e| format!("cannot map a file: {e}"))?;
        Self { start, bytes }.in_small_pages()
    }

    /// Disables huge pages for the mapping.
    fn in_small_pages(self) -> Result<Self, String> {
        // SAFETY: the mapping is this value's own; the advice changes no byte of it.
        match unsafe { madvise(self.start, self.bytes, MmapAdvise::MADV_NOHUGEPAGE) } {
            // A kernel without huge pages has only small ones.
            Ok(()) | Err(Errno::EINVAL) => Ok(self),
            Err(e) => Err(format!("cannot disable huge pages: {e}")),
        }
    }

    /// Returns the address of the first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start.cast()
    }

    /// Returns all bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is readable and writable, and `bytes` is its length; `self` is
        // borrowed for as long as the slice.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast().as_ptr(), self.bytes) }
    }

    /// Returns the duration of reading one byte every `step` bytes.
    fn read_every(&self, step: usize) -> Duration {
        let began = Instant::now();
        for at in (0..self.bytes).step_by(step) {
            // SAFETY: `at` is inside of the mapping, which is readable.
            let byte = unsafe { self.start.cast::<u8>().add(at).read_volatile() };
            std::hint::black_box(byte);
        }
        began.elapsed()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and no reference to it exists any longer.
        let unmapped = unsafe { munmap(self.start, self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Measures the first write to a page of anonymous memory.
pub(super) fn fresh_fault() -> Result<Cost, String> {
    // A new mapping for each batch, because only the first write to a page faults.
    batches(PAGES as u32, || {
        let mut mapping = Mapping::anonymous(PAGES * PAGE)?;
        let began = Instant::now();
        for page in mapping.bytes().chunks_mut(PAGE) {
            page[0] = 1;
        }
        Ok(began.elapsed())
    })
}

/// Measures the first read of a page of a cached file. The kernel also maps the neighbouring pages.
pub(super) fn file_fault(directory: &Path) -> Result<Cost, String> {
    let failed = |e| format!("cannot use a file in {}: {e}", directory.display());
    let mut file = tempfile::tempfile_in(directory).map_err(failed)?;
    let faults = PAGES / 4;
    // Do not write zeros: a file system may allocate no blocks for them.
    let bytes = vec![1; faults * FAULT_AROUND];
    file.write_all(&bytes)
        .and_then(|()| file.rewind())
        .map_err(failed)?;
    batches(faults as u32, || {
        Ok(Mapping::of_file(&file, bytes.len())?.read_every(FAULT_AROUND))
    })
}

/// Measures a copy of a page between buffers that are larger than the caches of a core.
pub(super) fn copy() -> Result<Cost, String> {
    let from = vec![1; 4 * PAGES * PAGE];
    let mut to = vec![2; from.len()];
    batches(4 * PAGES as u32, || {
        let began = Instant::now();
        // `black_box` prevents the compiler from merging or removing copies.
        for (from, to) in from.chunks(PAGE).zip(to.chunks_mut(PAGE)) {
            to.copy_from_slice(std::hint::black_box(from));
        }
        std::hint::black_box(&to);
        Ok(began.elapsed())
    })
}
