//! Ring buffer with the last console output of a guest, in memory that `jiffy-vmm` (the writer) and
//! the host (the reader) share.
//!
//! The buffer outlives the VMM, so that the last output of a guest is available even if its VMM was
//! killed. Layout: one page, whose first 8 bytes contain the total number of bytes written, then
//! [`CAPACITY`] bytes of data. The reader does not trust the content and interprets it only as
//! bytes.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of stored bytes of console output. Older output is overwritten.
pub const CAPACITY: usize = 64 * 1024;
/// Offset of the data: one page, so that the header has a page of its own.
const HEADER_BYTES: usize = 4096;
/// Size of the file, and of its mapping in each process, in bytes.
const MAPPING_BYTES: NonZeroUsize = match NonZeroUsize::new(HEADER_BYTES + CAPACITY) {
    Some(n) => n,
    None => unreachable!(),
};

/// Seals of the file. They make its size constant.
const SEALS: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW);

/// A mapped console ring.
#[derive(Debug)]
pub struct ConsoleRing {
    fd: OwnedFd,
    map: NonNull<libc::c_void>,
}

// SAFETY: the mapping is valid while the value exists, and is accessed only through atomics and
// copies of raw bytes.
unsafe impl Send for ConsoleRing {}
// SAFETY: as above. Concurrent readers may see bytes that are being replaced, and must handle this
// in any case.
unsafe impl Sync for ConsoleRing {}

impl ConsoleRing {
    /// Creates an empty ring in an anonymous file.
    pub fn create() -> Result<Self, Errno> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create(c"jiffy-console", flags)?;
        nix::unistd::ftruncate(&fd, MAPPING_BYTES.get() as i64)?;
        // The seals are set before the file is shared, so that no process can change its size.
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SEALS))?;
        Self::open(fd)
    }

    /// Maps a ring that another process created. Fails if the file has another size, or if the
    /// other process could shrink it, which would kill the reader.
    pub fn open(fd: OwnedFd) -> Result<Self, Errno> {
        let size = nix::sys::stat::fstat(&fd)?.st_size;
        let seals = fcntl(&fd, FcntlArg::F_GET_SEALS)?;
        if size != MAPPING_BYTES.get() as i64
            || !SealFlag::from_bits_truncate(seals).contains(SEALS)
        {
            return Err(Errno::EINVAL);
        }
        // SAFETY: a new shared mapping of a file of exactly this length. No references point into
        // it.
        let map = unsafe {
            mmap(
                None,
                MAPPING_BYTES,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                &fd,
                0,
            )?
        };
        Ok(Self { fd, map })
    }

    /// Returns the file, which can be sent to the other process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn total(&self) -> &AtomicU64 {
        // SAFETY: these are the first 8 bytes of a live, page-aligned mapping. Both processes
        // access them only atomically.
        unsafe { AtomicU64::from_ptr(self.map.as_ptr().cast()) }
    }

    fn byte(&self, position: u64) -> *mut u8 {
        let offset = HEADER_BYTES + (position % CAPACITY as u64) as usize;
        // SAFETY: the offset is less than the length of the mapping by construction.
        unsafe { self.map.as_ptr().cast::<u8>().add(offset) }
    }

    /// Appends output. There must be only one writer.
    pub fn write(&self, bytes: &[u8]) {
        // Relaxed: this process is the only writer of the number.
        let mut total = self.total().load(Ordering::Relaxed);
        for &b in bytes {
            // SAFETY: `byte` points into the mapping. The write is volatile because the other
            // process reads the byte.
            unsafe { self.byte(total).write_volatile(b) };
            total = total.wrapping_add(1);
        }
        // Release: a reader that sees the new number also sees the bytes before it.
        self.total().store(total, Ordering::Release);
    }

    /// Returns all stored output, oldest first.
    pub fn tail(&self) -> Vec<u8> {
        self.since(0).0
    }

    /// Returns the stored output after byte number `position`, and the position for the next call.
    pub fn since(&self, position: u64) -> (Vec<u8>, u64) {
        // Acquire: pairs with the Release of the writer.
        let total = self.total().load(Ordering::Acquire);
        // The writer is not trusted and may decrease the number. At most `CAPACITY` bytes are read
        // in any case.
        let start = position
            .max(total.saturating_sub(CAPACITY as u64))
            .min(total);
        // Bytes before `start` were overwritten, or are already known to the caller.
        let bytes = (start..total)
            // SAFETY: `byte` points into the mapping. The read is volatile because the other
            // process writes the byte.
            .map(|at| unsafe { self.byte(at).read_volatile() })
            .collect();
        (bytes, total)
    }
}

impl Drop for ConsoleRing {
    fn drop(&mut self) {
        // SAFETY: this is the mapping of `open`, which is unmapped only once.
        unsafe {
            // Ignore the error: the mapping exists with exactly this length, so the call cannot
            // fail.
            let _ = munmap(self.map, MAPPING_BYTES.get());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reader_sees_the_newest_bytes_in_order() {
        let writer = ConsoleRing::create().unwrap();
        let reader = ConsoleRing::open(writer.fd().try_clone_to_owned().unwrap()).unwrap();
        writer.write(b"hello ");
        writer.write(b"world");
        assert_eq!(reader.tail(), b"hello world");
        let (_, position) = reader.since(0);
        let long: Vec<u8> = (0..CAPACITY + 10).map(|i| (i % 251) as u8).collect();
        writer.write(&long);
        assert_eq!(reader.tail(), long[10..]);
        assert_eq!(reader.since(position).0.len(), CAPACITY);
    }

    #[test]
    fn a_file_of_another_or_a_changeable_size_is_refused() {
        let file = |length| {
            let fd = memfd_create(c"x", MFdFlags::MFD_ALLOW_SEALING).unwrap();
            nix::unistd::ftruncate(&fd, length).unwrap();
            fd
        };
        let refused = Some(Errno::EINVAL);
        assert_eq!(ConsoleRing::open(file(7)).err(), refused);
        assert_eq!(
            ConsoleRing::open(file(MAPPING_BYTES.get() as i64)).err(),
            refused
        );
        let ring = ConsoleRing::create().unwrap();
        assert_eq!(nix::unistd::ftruncate(ring.fd(), 7), Err(Errno::EPERM));
    }
}
