//! Guest memory of which some chunks are not stored on this host yet. The fetcher obtains such a
//! chunk when it is accessed ("lazily").
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *chunk* is 64 KiB of memory. The *fetcher* is a process of this host that
//! downloads chunks from a shared store.
//!
//! Each chunk is either missing or complete: its pages are filled in one step, under the lock. No
//! page of a missing chunk is present, so the search for written pages never reports such a chunk,
//! and a snapshot inherits it from the layers below. This matters because the process that writes a
//! snapshot cannot distinguish missing pages from zero pages.

use super::linear_memory::{CHUNK_BYTES, CHUNK_SIZE, LinearMemory};
use super::map_layers::{ChunkExtent, ChunkSource, MappingPlan};
use super::memory_layers::MemoryLayers;
use super::userfaultfd::Userfaultfd;
use crate::machine::bus::lock;
use jiffy_proto::layer::{MEMORY_PAGE, UnitSet};
use nix::errno::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;

const PAGE: u64 = MEMORY_PAGE as u64;
const CHUNK_PAGES: u64 = CHUNK_SIZE / PAGE;

/// Incomplete layers. Their missing chunks are registered instead of mapped.
pub struct LazyLayers<'a> {
    /// The layers.
    pub layers: &'a MemoryLayers,
    /// Receives faults on missing chunks.
    pub userfaultfd: &'a Userfaultfd,
}

impl ChunkSource for LazyLayers<'_> {
    fn map(&self, piece: &ChunkExtent) -> Result<bool, Errno> {
        self.layers.map(piece)
    }

    fn read(&self, piece: &ChunkExtent) -> Result<(), Errno> {
        self.layers.read(piece)
    }

    fn defer(&self, host: *mut u8, bytes: u64) -> Result<(), Errno> {
        let start = u64::try_from(host.addr()).map_err(|_| Errno::EOVERFLOW)?;
        self.userfaultfd.register(start, bytes)
    }
}

/// Memory with missing chunks.
#[derive(Debug)]
pub struct LazyMemory {
    userfaultfd: Userfaultfd,
    linear: LinearMemory,
    state: Mutex<MissingMemoryState>,
}

/// State of missing memory.
#[derive(Debug)]
struct MissingMemoryState {
    /// Chunks without any present page.
    missing: UnitSet,
    /// Pages of missing chunks that the guest returned to the host: their content is no longer
    /// needed.
    freed: UnitSet,
}

impl LazyMemory {
    /// Creates the lazy memory. `plan` must have been executed with [`LazyLayers`].
    pub fn new(userfaultfd: Userfaultfd, linear: LinearMemory, plan: &MappingPlan) -> Self {
        let mut missing = UnitSet::empty(linear.chunks());
        for (_, run) in &plan.later {
            missing.insert_range(run.clone());
        }
        let freed = UnitSet::empty(linear.chunks() * CHUNK_PAGES);
        Self {
            userfaultfd,
            linear,
            state: Mutex::new(MissingMemoryState { missing, freed }),
        }
    }

    /// Returns the missing chunks.
    pub fn missing(&self) -> UnitSet {
        lock(&self.state).missing.clone()
    }

    /// Returns whether `chunk` is missing.
    pub fn is_missing(&self, chunk: u64) -> bool {
        lock(&self.state).missing.contains(chunk)
    }

    /// Returns the addresses of pending faults.
    pub fn faults(&self) -> Result<Vec<u64>, Errno> {
        self.userfaultfd.faults()
    }

    /// Returns the chunk of the page at `address` in this process.
    pub fn chunk_of(&self, address: u64) -> Option<u64> {
        self.linear.chunk_of(address)
    }

    /// Fills a missing chunk. A chunk that was filled before retains its content.
    pub fn fill(&self, chunk: u64, content: &[u8; CHUNK_BYTES]) -> Result<(), Errno> {
        let start = self.address(chunk)?;
        // Hold the lock until the chunk is complete: `discard` must not drop pages in between.
        let mut state = lock(&self.state);
        // Another fault on the same chunk was answered already. Only resume the waiting threads.
        if !state.missing.contains(chunk) {
            return self.userfaultfd.wake(start, CHUNK_SIZE);
        }
        let pages = chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES;
        let freed: Vec<u64> = state.freed.iter_range(pages.clone()).collect();
        // Fill the runs between returned pages. A returned page stays empty. When it is accessed,
        // `zero` fills it.
        let mut next = pages.start;
        for stop in freed.iter().copied().chain([pages.end]) {
            let offset = usize::try_from((next - pages.start) * PAGE);
            let end = usize::try_from((stop - pages.start) * PAGE);
            if let (Ok(offset), Ok(end)) = (offset, end)
                && let Some(run) = content.get(offset..end).filter(|run| !run.is_empty())
            {
                let to = start + (next - pages.start) * PAGE;
                self.userfaultfd.copy(to, run)?;
            }
            next = stop + 1;
        }
        state.missing.remove(chunk);
        freed.iter().for_each(|&page| state.freed.remove(page));
        // `copy` has resumed the threads that wait for copied pages. Also resume a thread that
        // waits for a returned page: the thread faults again and then receives a zero page.
        if freed.is_empty() {
            Ok(())
        } else {
            self.userfaultfd.wake(start, CHUNK_SIZE)
        }
    }

    /// Handles a fault at `address` in a chunk that is not missing: the guest returned the page.
    pub fn zero(&self, address: u64) -> Result<(), Errno> {
        self.userfaultfd.zero(address / PAGE * PAGE)
    }

    /// Drops the pages of a range of guest memory, which must consist of whole pages. Their content
    /// is zero afterwards, even if they were missing.
    pub fn discard(&self, host: *mut u8, bytes: usize) -> Result<(), Errno> {
        let start = u64::try_from(host.addr()).map_err(|_| Errno::EOVERFLOW)?;
        let pages = u64::try_from(bytes).map_err(|_| Errno::EOVERFLOW)? / PAGE;
        let mut state = lock(&self.state);
        // A range of guest memory is inside one region, in which chunks are contiguous.
        if let Some(first) = self.linear.page_of(start) {
            for page in first..first + pages {
                // A page that is neither missing nor present is zeroed by the fault handler
                // (`zero`).
                if state.missing.contains(page / CHUNK_PAGES) {
                    state.freed.insert(page);
                }
            }
        }
        // Drop the pages under the lock of the state: no chunk may be filled in between.
        //
        // SAFETY: the range is guest memory, which is only accessed through volatile accesses and
        // system calls, so its content may change at any time.
        let result = unsafe { libc::madvise(host.cast(), bytes, libc::MADV_DONTNEED) };
        Errno::result(result).map(drop)
    }

    /// Returns the address of a chunk in this process.
    fn address(&self, chunk: u64) -> Result<u64, Errno> {
        let host = self.linear.chunk(chunk).ok_or(Errno::EFAULT)?;
        u64::try_from(host.addr()).map_err(|_| Errno::EOVERFLOW)
    }
}

impl AsFd for LazyMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.userfaultfd.as_fd()
    }
}

#[cfg(test)]
mod tests;
