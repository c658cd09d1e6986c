//! Hashes of the chunks that a snapshot stored. The next snapshot compares memory with the hashes:
//! data written with direct I/O is not in the page cache and would have to be read from storage.
//!
//! A *chunk* is 64 KiB of memory. A *writer process* is forked from the VMM, and writes the memory
//! of a snapshot to files while the guest runs.

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::num::NonZeroUsize;
use std::ptr::NonNull;

const HASH_BYTES: usize = 16;

/// Hash of a chunk. The hash function is collision-resistant because guests choose the content.
pub type ChunkHash = [u8; HASH_BYTES];

/// One hash per chunk, in memory shared with the writer processes. Pages are allocated when they
/// are written.
#[derive(Debug)]
pub struct ChunkHashes {
    start: NonNull<ChunkHash>,
    chunks: usize,
}

// SAFETY: the mapping belongs to this value. Processes that share it exit before it is read.
unsafe impl Send for ChunkHashes {}

impl ChunkHashes {
    /// Creates the hashes for a memory of `chunks` chunks.
    pub fn new(chunks: u64) -> Result<Self, Errno> {
        let chunks = usize::try_from(chunks).map_err(|_| Errno::EOVERFLOW)?;
        let bytes = chunks
            .checked_mul(HASH_BYTES)
            .and_then(NonZeroUsize::new)
            .ok_or(Errno::EOVERFLOW)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address chosen by the kernel.
        let start = unsafe { mmap_anonymous(None, bytes, protection, MapFlags::MAP_SHARED) }?;
        Ok(Self {
            start: start.cast(),
            chunks,
        })
    }

    /// Returns the address of a chunk's hash.
    fn slot(&self, chunk: u64) -> Option<*mut ChunkHash> {
        let at = usize::try_from(chunk).ok().filter(|&at| at < self.chunks)?;
        // SAFETY: the index is below the number of hashes in the mapping.
        Some(unsafe { self.start.as_ptr().add(at) })
    }

    /// Sets the hash of a chunk. Only one process sets each hash.
    pub fn set(&self, chunk: u64, hash: ChunkHash) {
        if let Some(slot) = self.slot(chunk) {
            // SAFETY: the pointer is inside the mapping, bytes need no alignment, and no other
            // process accesses this hash now.
            unsafe { slot.write(hash) };
        }
    }

    /// Returns the hash of a chunk. The chunk must be stored: the hash of any other chunk is zero.
    pub fn get(&self, chunk: u64) -> Option<ChunkHash> {
        // SAFETY: the pointer is inside the mapping, and the processes that wrote the hash have
        // exited.
        self.slot(chunk).map(|slot| unsafe { slot.read() })
    }
}

impl Drop for ChunkHashes {
    fn drop(&mut self) {
        // SAFETY: unmaps the mapping from `new`, to which no references exist. This cannot fail.
        let _ = unsafe { munmap(self.start.cast(), self.chunks * HASH_BYTES) };
    }
}

/// Returns the hash of `bytes`. Does not allocate memory.
pub fn hash_chunk(bytes: &[u8]) -> ChunkHash {
    // 128 bits of the hash are sufficient to make collisions infeasible and save half of the
    // memory.
    let mut short = ChunkHash::default();
    let whole = blake3::hash(bytes);
    if let Some(first) = whole.as_bytes().first_chunk() {
        short = *first;
    }
    short
}
