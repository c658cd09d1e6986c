//! Detects which private pages the guest has written since its newest snapshot, so that the next
//! snapshot compares, and a rollback to that snapshot reverts, only these pages.
//!
//! A *private* page of the guest belongs to this process alone, because the guest has written it or
//! the VMM has copied it. The *writer* is a process forked from the VMM, which writes the memory of
//! a snapshot to files.
//!
//! A snapshot write-protects the private pages with a userfaultfd in asynchronous mode (Linux 6.7).
//! The kernel resolves the first write to such a page by itself, and [`super::pagemap_scan`] then
//! reports the page as written. The fork of the snapshot's writer write-protects the same pages, so
//! the guest has no additional faults. KVM and the VMM's devices write through the same page table.
//!
//! The userfaultfd handles no fault. It cannot handle faults of the kernel, because it is created
//! without this right. A compromised VMM therefore cannot use it to delay the kernel.

use super::linear_memory::{CHUNK_SIZE, LinearMemory};
use super::pagemap_scan::protect_private;
use super::userfaultfd::Userfaultfd;
use jiffy_proto::layer::UnitSet;
use nix::errno::Errno;
use std::fs::File;

/// Tracker of written pages. Creating it does not change memory.
#[derive(Debug)]
pub struct WriteTracker(Userfaultfd);

impl WriteTracker {
    /// Creates a tracker. `None` if the kernel does not support it.
    pub fn new() -> Option<Self> {
        Userfaultfd::tracking_writes().ok().map(Self)
    }

    /// Write-protects the `private` pages of guest memory, according to this process's `pagemap`.
    /// Until this call, every page counts as written. No vCPU or device may be running.
    pub fn protect(
        &self,
        pagemap: &File,
        linear: &LinearMemory,
        private: &UnitSet,
    ) -> Result<(), Errno> {
        // Register all memory again: a rollback has replaced some of the mappings.
        for (_, chunks, host) in linear.extents(0..linear.chunks()) {
            let start = u64::try_from(host.addr()).map_err(|_| Errno::EOVERFLOW)?;
            self.0.register_write_tracking(start, chunks * CHUNK_SIZE)?;
        }
        protect_private(pagemap, linear, private)
    }
}
