//! Guest memory that has not all arrived.
//!
//! A chunk is missing or complete: its pages are filled in one step, under the lock. No page of a
//! missing chunk is present, so the search for written pages never finds one, and a snapshot
//! inherits it from the layers below. The process that writes a snapshot could not tell a missing
//! page from a zero one.

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

/// Layers with holes, which are not mapped but registered.
pub struct LazyLayers<'a> {
    /// The layers.
    pub layers: &'a MemoryLayers,
    /// Receives faults on chunks that are not there.
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

/// Memory in which chunks are missing.
#[derive(Debug)]
pub struct LazyMemory {
    userfaultfd: Userfaultfd,
    linear: LinearMemory,
    arrivals: Mutex<Arrivals>,
}

#[derive(Debug)]
struct Arrivals {
    /// Chunks without any page.
    missing: UnitSet,
    /// Pages of missing chunks that the guest gave back: their content is not wanted any more.
    freed: UnitSet,
}

impl LazyMemory {
    /// Memory after `plan` was carried out with [`LazyLayers`].
    pub fn new(userfaultfd: Userfaultfd, linear: LinearMemory, plan: &MappingPlan) -> Self {
        let mut missing = UnitSet::empty(linear.chunks());
        for (_, run) in &plan.later {
            missing.insert_range(run.clone());
        }
        let freed = UnitSet::empty(linear.chunks() * CHUNK_PAGES);
        Self {
            userfaultfd,
            linear,
            arrivals: Mutex::new(Arrivals { missing, freed }),
        }
    }

    /// The chunks that are missing.
    pub fn missing(&self) -> UnitSet {
        lock(&self.arrivals).missing.clone()
    }

    /// Returns true if `chunk` is missing.
    pub fn is_missing(&self, chunk: u64) -> bool {
        lock(&self.arrivals).missing.contains(chunk)
    }

    /// Addresses of faults that wait.
    pub fn faults(&self) -> Result<Vec<u64>, Errno> {
        self.userfaultfd.faults()
    }

    /// Chunk of the page at `address` in this process.
    pub fn chunk_of(&self, address: u64) -> Option<u64> {
        self.linear.chunk_of(address)
    }

    /// Fills a missing chunk; one that arrived before keeps its content.
    pub fn fill(&self, chunk: u64, content: &[u8; CHUNK_BYTES]) -> Result<(), Errno> {
        let start = self.address(chunk)?;
        let mut arrivals = lock(&self.arrivals);
        if !arrivals.missing.contains(chunk) {
            return self.userfaultfd.wake(start, CHUNK_SIZE);
        }
        let pages = chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES;
        let freed: Vec<u64> = arrivals.freed.iter_range(pages.clone()).collect();
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
        arrivals.missing.remove(chunk);
        freed.iter().for_each(|&page| arrivals.freed.remove(page));
        // A wait for a page that was given back ends in a further fault, and that in a zero page.
        match freed.is_empty() {
            true => Ok(()),
            false => self.userfaultfd.wake(start, CHUNK_SIZE),
        }
    }

    /// Serves a fault at `address` in a chunk that is not missing: its page was given back.
    pub fn zero(&self, address: u64) -> Result<(), Errno> {
        self.userfaultfd.zero(address / PAGE * PAGE)
    }

    /// Drops the pages of a range of guest memory, which begins and ends at pages. They are zero
    /// when they are touched again, also those that have not arrived.
    pub fn discard(&self, host: *mut u8, bytes: usize) -> Result<(), Errno> {
        let start = u64::try_from(host.addr()).map_err(|_| Errno::EOVERFLOW)?;
        let pages = u64::try_from(bytes).map_err(|_| Errno::EOVERFLOW)? / PAGE;
        let mut arrivals = lock(&self.arrivals);
        // A range of guest memory lies in one region, in which chunks follow each other.
        if let Some(first) = self.linear.page_of(start) {
            for page in first..first + pages {
                if arrivals.missing.contains(page / CHUNK_PAGES) {
                    arrivals.freed.insert(page);
                }
            }
        }
        // Under the lock: a chunk must not be filled between the two.
        // SAFETY: the range is guest memory, which is only reached through volatile accesses and
        // system calls, so that its content may change at any time.
        let result = unsafe { libc::madvise(host.cast(), bytes, libc::MADV_DONTNEED) };
        Errno::result(result).map(drop)
    }

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
