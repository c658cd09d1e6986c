//! Read-only mappings of layer files, with which a snapshot compares memory. The compared pages are
//! usually scattered. Reading each page first would cost a system call and a copy.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors.

use super::linear_memory::CHUNK_BYTES;
use super::memory_layers::MemoryLayers;
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::num::NonZeroUsize;
use std::ptr::NonNull;

/// Mappings of the files of layers, each created when it is first needed. After its creation, this
/// value allocates no memory and takes no lock. It may be used in a process forked from a
/// multi-threaded process, in which another thread may have locked the allocator.
#[derive(Debug)]
pub struct LayerMappings {
    bytes: NonZeroUsize,
    starts: Vec<Option<NonNull<u8>>>,
}

impl LayerMappings {
    /// Creates mappings for `layers`, whose files have `bytes` bytes.
    pub fn new(layers: &MemoryLayers, bytes: u64) -> Self {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        Self {
            // Memory is never empty, and a mapping of one byte would fail all later checks.
            bytes: NonZeroUsize::new(bytes).unwrap_or(NonZeroUsize::MIN),
            starts: vec![None; layers.len()],
        }
    }

    /// Returns the bytes of a chunk in the file of layer `number`, starting at `offset`.
    pub fn chunk(
        &mut self,
        layers: &MemoryLayers,
        number: usize,
        offset: usize,
    ) -> Result<&[u8], Errno> {
        let end = offset.checked_add(CHUNK_BYTES).ok_or(Errno::EOVERFLOW)?;
        if end > self.bytes.get() {
            return Err(Errno::EFAULT);
        }
        let slot = self.starts.get_mut(number).ok_or(Errno::ENOENT)?;
        let start = match *slot {
            Some(start) => start,
            None => *slot.insert(map(layers, number, self.bytes)?),
        };
        // SAFETY: the mapping has `bytes` bytes, and the chunk ends before.
        let chunk = unsafe { start.add(offset) };
        // If storage cannot be read, this call fails. An access would end the process.
        //
        // SAFETY: advice for a mapping owned by this object.
        let read =
            unsafe { libc::madvise(chunk.as_ptr().cast(), CHUNK_BYTES, libc::MADV_POPULATE_READ) };
        match Errno::result(read) {
            // Kernels before 5.14 do not support the advice, and read on access.
            Ok(_) | Err(Errno::EINVAL) => {}
            Err(Errno::EFAULT) => return Err(Errno::EIO),
            Err(e) => return Err(e),
        }
        // SAFETY: the chunk is inside the mapping, which exists as long as this object. The file
        // belongs to an immutable snapshot, so that its stored chunks never change.
        Ok(unsafe { std::slice::from_raw_parts(chunk.as_ptr(), CHUNK_BYTES) })
    }
}

fn map(layers: &MemoryLayers, number: usize, bytes: NonZeroUsize) -> Result<NonNull<u8>, Errno> {
    let file = layers.file(number).ok_or(Errno::ENOENT)?;
    let (protection, flags) = (ProtFlags::PROT_READ, MapFlags::MAP_SHARED);
    // SAFETY: a new mapping at an address chosen by the kernel. The file has this length
    // (`MemoryLayers::new`) and is never shortened.
    unsafe { mmap(None, bytes, protection, flags, file, 0) }.map(NonNull::cast)
}

impl Drop for LayerMappings {
    fn drop(&mut self) {
        for start in self.starts.iter().flatten() {
            // Ignore the error: the mapping then remains until the process exits.
            //
            // SAFETY: the mapping belongs to this object, and no reference to it outlives it.
            let _ = unsafe { munmap(start.cast(), self.bytes.get()) };
        }
    }
}
