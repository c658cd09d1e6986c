//! Output files of a memory layer. Long runs bypass the page cache, short runs are written through
//! it.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *run* is a series of bytes that are adjacent in memory and in the layer.
//!
//! Writing a large layer through the page cache allocates page cache of the same size. This takes
//! several times as long as writing to storage, and evicts useful pages. Short runs contain memory
//! that a running system uses all the time, so restores should find them in the page cache.

use crate::memory::HUGE_PAGE_BYTES;
use nix::errno::Errno;
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous};

/// Maximum number of bytes written by one call.
pub const MAX_RUN_BYTES: usize = 4 << 20;
/// Minimum size of a run that bypasses the page cache, in bytes. For a shorter run, an additional
/// call costs more than the page cache that it saves.
const MIN_DIRECT_RUN_BYTES: usize = 256 << 10;

/// File of a memory layer, opened once or twice.
pub struct LayerOutput<'a> {
    file: &'a File,
    /// `file`, opened again with `O_DIRECT`. `None` if this is not supported or not worthwhile.
    direct: Option<&'a File>,
    buffer: Option<NonNull<u8>>,
}

impl<'a> LayerOutput<'a> {
    /// Creates the output. `direct` is the same file opened with `O_DIRECT`.
    pub fn new(file: &'a File, direct: Option<&'a File>) -> Self {
        Self {
            file,
            direct,
            buffer: None,
        }
    }

    /// Returns whether long runs bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Copies long runs to a bounce buffer before writing them. Required in a process that shares
    /// guest memory copy-on-write with its parent: the kernel would first copy each shared page for
    /// direct I/O, and the copies would remain. Only makes system calls and does not use the
    /// allocator. If the buffer cannot be allocated, all data is written through the page cache.
    pub fn enable_bounce_buffer(&mut self) {
        if self.direct.is_none() {
            return;
        }
        // The buffer is never unmapped: only processes that exit soon use one.
        self.buffer = huge_buffer();
        if self.buffer.is_none() {
            self.direct = None;
        }
    }

    /// Sets the length of the file to `bytes` bytes.
    pub fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        // `File::set_len` would be equivalent, but this process must not run arbitrary library code
        // after the fork.
        let bytes = i64::try_from(bytes).map_err(|_| Errno::EOVERFLOW)?;
        // SAFETY: a call on an open descriptor that accesses no memory of this process.
        if unsafe { libc::ftruncate(self.file.as_raw_fd(), bytes) } != 0 {
            return Err(Errno::last());
        }
        Ok(())
    }

    /// Writes whole pages of guest memory.
    pub fn write(&mut self, data: &[u8], offset: i64) -> Result<(), Errno> {
        let Some(direct) = self.direct.filter(|_| data.len() >= MIN_DIRECT_RUN_BYTES) else {
            return write(self.file, data, offset);
        };
        let written = match self.buffer {
            None => write(direct, data, offset),
            Some(buffer) => {
                // SAFETY: the buffer has MAX_RUN_BYTES bytes, is mapped until the process exits,
                // and is only used here.
                let buffer =
                    unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr(), MAX_RUN_BYTES) };
                write_copies(direct, buffer, data, offset)
            }
        };
        match written {
            // The file system permits opening with O_DIRECT, but does not support writing, or
            // requires a larger alignment.
            Err(Errno::EINVAL | Errno::EOPNOTSUPP) => {
                self.direct = None;
                write(self.file, data, offset)
            }
            other => other,
        }
    }
}

/// Writes copies of `data` from `buffer`, which has [`MAX_RUN_BYTES`] bytes.
fn write_copies(file: &File, buffer: &mut [u8], data: &[u8], mut offset: i64) -> Result<(), Errno> {
    for piece in data.chunks(MAX_RUN_BYTES) {
        let copy = buffer.get_mut(..piece.len()).ok_or(Errno::EOVERFLOW)?;
        copy.copy_from_slice(piece);
        write(file, copy, offset)?;
        offset += i64::try_from(piece.len()).map_err(|_| Errno::EOVERFLOW)?;
    }
    Ok(())
}

/// Maps a buffer that begins on the boundary of a huge page.
fn huge_buffer() -> Option<NonNull<u8>> {
    let length = NonZeroUsize::new(MAX_RUN_BYTES + HUGE_PAGE_BYTES)?;
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new private mapping at an address chosen by the kernel.
    let mapping =
        unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE) }.ok()?;
    let start = mapping.cast::<u8>();
    let skip = start.as_ptr().align_offset(HUGE_PAGE_BYTES);
    // SAFETY: the mapping exceeds the buffer by the maximum number of skipped bytes.
    let buffer = unsafe { start.add(skip.min(HUGE_PAGE_BYTES)) };
    // With huge pages, storage receives few long segments instead of many pages. Ignore the error:
    // the buffer also works without huge pages.
    //
    // SAFETY: advice for a mapping owned by this function.
    let _ = unsafe { madvise(buffer.cast(), MAX_RUN_BYTES, MmapAdvise::MADV_HUGEPAGE) };
    Some(buffer)
}

/// Writes all of `from` at `offset`.
pub fn write(file: &File, mut from: &[u8], mut offset: i64) -> Result<(), Errno> {
    while !from.is_empty() {
        // SAFETY: `from` is readable memory of this length.
        let count =
            unsafe { libc::pwrite(file.as_raw_fd(), from.as_ptr().cast(), from.len(), offset) };
        let count = match usize::try_from(count) {
            // A write of 0 bytes would repeat forever.
            Ok(0) => return Err(Errno::EIO),
            Ok(count) => count,
            Err(_) if Errno::last() == Errno::EINTR => continue,
            Err(_) => return Err(Errno::last()),
        };
        from = from.get(count..).ok_or(Errno::EIO)?;
        offset += i64::try_from(count).map_err(|_| Errno::EOVERFLOW)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_run_longer_than_the_bounce_buffer_is_written_completely() {
        let file = tempfile::tempfile().unwrap();
        // The page cache accepts the same calls as `O_DIRECT`, which `tmpfs` may not support.
        let mut output = LayerOutput::new(&file, Some(&file));
        output.enable_bounce_buffer();
        assert!(output.is_direct());
        let data: Vec<u8> = (0..2 * MAX_RUN_BYTES + 4096)
            .map(|i| u8::try_from(i % 251).unwrap())
            .collect();
        output.write(&data, 4096).unwrap();
        let mut back = vec![0; data.len()];
        file.read_exact_at(&mut back, 4096).unwrap();
        assert!(back == data);
    }
}
