//! Last console output of a guest, in memory shared between `jiffy-vmm` (writes) and the host
//! (reads).
//!
//! It outlives the VMM, so that the last output of a guest can be shown even when its VMM was
//! killed. Layout: one page whose first 8 bytes count all bytes ever written, then [`CAPACITY`]
//! bytes of ring. The reader treats the content as hostile: bytes, never structure.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of console output that are kept.
pub const CAPACITY: usize = 64 * 1024;
const HEADER_BYTES: usize = 4096;
const MAPPING_BYTES: NonZeroUsize = match NonZeroUsize::new(HEADER_BYTES + CAPACITY) {
    Some(n) => n,
    None => unreachable!(),
};

/// The size is fixed.
const SEALS: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW);

/// A mapped console ring.
#[derive(Debug)]
pub struct ConsoleRing {
    fd: OwnedFd,
    map: NonNull<libc::c_void>,
}

// SAFETY: the mapping is valid for the life of the value and only accessed through atomics and raw
// byte copies.
unsafe impl Send for ConsoleRing {}
// SAFETY: as above; concurrent readers may see bytes that are being replaced, which they must
// expect anyway.
unsafe impl Sync for ConsoleRing {}

impl ConsoleRing {
    /// A new, empty ring in an anonymous file.
    pub fn create() -> Result<Self, Errno> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create(c"jiffy-console", flags)?;
        nix::unistd::ftruncate(&fd, MAPPING_BYTES.get() as i64)?;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SEALS))?;
        Self::open(fd)
    }

    /// Maps a ring that another process created. Fails on files of another size, and on those that
    /// the other process could shrink: that would kill the reader.
    pub fn open(fd: OwnedFd) -> Result<Self, Errno> {
        let size = nix::sys::stat::fstat(&fd)?.st_size;
        let seals = fcntl(&fd, FcntlArg::F_GET_SEALS)?;
        if size != MAPPING_BYTES.get() as i64
            || !SealFlag::from_bits_truncate(seals).contains(SEALS)
        {
            return Err(Errno::EINVAL);
        }
        // SAFETY: a fresh shared mapping of a file of exactly this length, which no safe code
        // aliases.
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

    /// The file, to hand to the other side.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn total(&self) -> &AtomicU64 {
        // SAFETY: the first 8 bytes of a page-aligned live mapping; both sides access them only
        // atomically.
        unsafe { AtomicU64::from_ptr(self.map.as_ptr().cast()) }
    }

    fn byte(&self, position: u64) -> *mut u8 {
        let offset = HEADER_BYTES + (position % CAPACITY as u64) as usize;
        // SAFETY: offset is below the length of the mapping by construction.
        unsafe { self.map.as_ptr().cast::<u8>().add(offset) }
    }

    /// Appends output. One writer only.
    pub fn write(&self, bytes: &[u8]) {
        let mut total = self.total().load(Ordering::Relaxed);
        for &b in bytes {
            // SAFETY: `byte` points into the mapping; volatile because the other process reads it.
            unsafe { self.byte(total).write_volatile(b) };
            total = total.wrapping_add(1);
        }
        self.total().store(total, Ordering::Release);
    }

    /// Returns all output that is kept, oldest first.
    pub fn tail(&self) -> Vec<u8> {
        self.since(0).0
    }

    /// Returns the kept output after byte number `position`, and the position for the next call.
    pub fn since(&self, position: u64) -> (Vec<u8>, u64) {
        let total = self.total().load(Ordering::Acquire);
        let start = position
            .max(total.saturating_sub(CAPACITY as u64))
            .min(total);
        let bytes = (start..total)
            // SAFETY: `byte` points into the mapping; volatile because the other process writes it.
            .map(|at| unsafe { self.byte(at).read_volatile() })
            .collect();
        (bytes, total)
    }
}

impl Drop for ConsoleRing {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `open`, unmapped once.
        unsafe {
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
