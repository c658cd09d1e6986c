//! Guest memory as one array of chunks (units of 64 KiB in which snapshots store memory): in
//! guest-physical order, without the hole below 4 GiB.

use crate::GuestMemory;
use crate::error::VmmError;
use jiffy_proto::layer::{MEMORY_CHUNK, MEMORY_PAGE};
use nix::errno::Errno;
use std::ops::Range;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

/// Size of a chunk, in bytes, for offsets.
pub const CHUNK_SIZE: u64 = MEMORY_CHUNK as u64;
const PAGE: u64 = MEMORY_PAGE as u64;
const CHUNK_PAGES: u64 = CHUNK_SIZE / PAGE;
/// Size of a chunk, in bytes, for lengths in memory.
pub const CHUNK_BYTES: usize = MEMORY_CHUNK as usize;

/// Chunks of one region of guest memory, which are contiguous in this process.
#[derive(Debug, Clone, Copy)]
struct LinearRegion {
    /// First chunk of the region, and number of its chunks.
    first: u64,
    chunks: u64,
    /// Address of the region in this process.
    host: *mut u8,
}

/// Addresses of chunks in the process. Guest memory is never unmapped, so they remain valid.
#[derive(Debug, Clone)]
pub struct LinearMemory {
    parts: Vec<LinearRegion>,
    chunks: u64,
}

// SAFETY: the pointers refer to guest memory, which exists until the process exits and is shared by
// all threads.
unsafe impl Send for LinearMemory {}
// SAFETY: as above. The methods only compute addresses.
unsafe impl Sync for LinearMemory {}

impl LinearMemory {
    /// Creates the array for `memory`, whose regions must consist of whole chunks.
    pub fn new(memory: &GuestMemory) -> Result<Self, VmmError> {
        let mut parts = Vec::new();
        let mut chunks = 0;
        for region in memory.iter() {
            let host = region
                .get_host_address(MemoryRegionAddress(0))
                .map_err(|e| VmmError::host("guest memory", e))?;
            if region.len() % CHUNK_SIZE != 0 {
                return Err(VmmError::host(
                    "guest memory",
                    "a region does not consist of whole chunks",
                ));
            }
            let part = LinearRegion {
                first: chunks,
                chunks: region.len() / CHUNK_SIZE,
                host,
            };
            chunks += part.chunks;
            parts.push(part);
        }
        Ok(Self { parts, chunks })
    }

    /// Returns the number of chunks.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.chunks * CHUNK_SIZE
    }

    /// Returns the address of a chunk. Does not allocate memory.
    pub fn chunk(&self, chunk: u64) -> Option<*mut u8> {
        self.parts.iter().find_map(|part| {
            let at = chunk.checked_sub(part.first).filter(|&n| n < part.chunks)?;
            let offset = usize::try_from(at * CHUNK_SIZE).ok()?;
            // SAFETY: the offset is below the length of the part's mapping.
            Some(unsafe { part.host.add(offset) })
        })
    }

    /// Calls `work` for each contiguous part of `pages` with its offset in memory, its length in
    /// bytes, and its address.
    pub fn each_extent_of_pages(
        &self,
        pages: Range<u64>,
        mut work: impl FnMut(u64, usize, *mut u8) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        // Chunks that contain the first and the last page. Their other pages are cut off below.
        let around = pages.start / CHUNK_PAGES..pages.end.div_ceil(CHUNK_PAGES);
        for (first, chunks, host) in self.extents(around) {
            let start = pages.start.max(first * CHUNK_PAGES);
            let end = pages.end.min((first + chunks) * CHUNK_PAGES);
            let skip = usize::try_from((start - first * CHUNK_PAGES) * PAGE);
            let bytes = usize::try_from((end - start) * PAGE).map_err(|_| Errno::EOVERFLOW)?;
            let skip = skip.map_err(|_| Errno::EOVERFLOW)?;
            work(start * PAGE, bytes, host.wrapping_add(skip))?;
        }
        Ok(())
    }

    /// Returns the index of the page at `address` in this process, in the same order as chunks.
    pub fn page_of(&self, address: u64) -> Option<u64> {
        self.parts.iter().find_map(|part| {
            let start = u64::try_from(part.host.addr()).ok()?;
            let offset = address.checked_sub(start)?;
            let first = part.first * (CHUNK_SIZE / u64::from(MEMORY_PAGE));
            (offset < part.chunks * CHUNK_SIZE).then(|| first + offset / u64::from(MEMORY_PAGE))
        })
    }

    /// Returns the chunk of the byte at `address` in this process.
    pub fn chunk_of(&self, address: u64) -> Option<u64> {
        let page = self.page_of(address)?;
        Some(page / (CHUNK_SIZE / u64::from(MEMORY_PAGE)))
    }

    /// Splits a run of chunks at region boundaries. Each extent consists of its first chunk, its
    /// number of chunks, and its address.
    pub fn extents(&self, run: Range<u64>) -> impl Iterator<Item = (u64, u64, *mut u8)> {
        self.parts.iter().filter_map(move |part| {
            let start = run.start.max(part.first);
            let end = run.end.min(part.first + part.chunks);
            (start < end)
                .then(|| Some((start, end - start, self.chunk(start)?)))
                .flatten()
        })
    }
}
