//! Search for private or present pages of guest memory. A chunk with private pages may differ from
//! the layers below, so a snapshot must compare it.
//!
//! A *private* page of the guest belongs to this process alone, because the guest has written it or
//! the VMM has copied it. A *chunk* is 64 KiB of memory or of a disk. A *layer* is the part of a
//! memory or disk that one snapshot stores: the content that differs from its ancestors.

use super::linear_memory::{CHUNK_BYTES, CHUNK_SIZE, LinearMemory};
use super::populate::runs;
use jiffy_proto::layer::{MEMORY_PAGE, UnitSet};
use jiffy_proto::page_scan::{
    FILE, HUGE, PAGEMAP_SCAN, PFNZERO, PRESENT, PROTECT_MATCHING, PageRegion, PageScan, SWAPPED,
    WRITTEN,
};
use nix::errno::Errno;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Bits of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const ENTRY_FILE: u64 = 1 << 61;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_PRESENT: u64 = 1 << 63;
const PAGE_BYTES: usize = 4096;
/// Granularity at which pages are searched for protection: 2 MiB.
const PROTECT_BLOCK_PAGES: u64 = 512;
/// Maximum number of ranges that one call to the kernel returns.
const SCAN_BATCH_RANGES: usize = 1024;

/// Kind of pages to search for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageFilter {
    /// Private pages: written by the guest, or copied from a layer.
    Private,
    /// Present pages, which were touched.
    Present,
}

/// Returns the chunks with at least one page that matches the filter, according to this process's
/// `pagemap`.
pub fn scan_pagemap(
    pagemap: &File,
    linear: &LinearMemory,
    pages: PageFilter,
) -> Result<UnitSet, Errno> {
    let mut found = FoundUnits::new(linear, CHUNK_SIZE);
    scan_units(pagemap, linear, pages, &mut found)?;
    Ok(found.matching)
}

/// Returns the pages that match the filter. Each has [`MEMORY_PAGE`] bytes.
pub fn scan_pages(
    pagemap: &File,
    linear: &LinearMemory,
    pages: PageFilter,
) -> Result<UnitSet, Errno> {
    let mut found = FoundUnits::new(linear, MEMORY_PAGE.into());
    scan_units(pagemap, linear, pages, &mut found)?;
    Ok(found.matching)
}

/// Private pages of a guest.
#[derive(Debug)]
pub struct PrivatePagesFound {
    /// All private pages.
    pub all: UnitSet,
    /// Private pages that may have been written since [`protect_private`]. All private pages if it
    /// was never called, or if the kernel cannot protect pages.
    pub written: UnitSet,
}

/// Returns the private pages, of which the written ones are found in the same scan.
pub fn scan_private(pagemap: &File, linear: &LinearMemory) -> Result<PrivatePagesFound, Errno> {
    let mut found = FoundUnits::new(linear, MEMORY_PAGE.into());
    found.written = Some(UnitSet::empty(found.matching.units()));
    scan_units(pagemap, linear, PageFilter::Private, &mut found)?;
    Ok(PrivatePagesFound {
        written: found.written.unwrap_or_else(|| found.matching.clone()),
        all: found.matching,
    })
}

/// Units with at least one page that matches a filter.
struct FoundUnits {
    /// Size of a unit in bytes, which divides the chunk size.
    unit: u64,
    matching: UnitSet,
    /// Units with a page that matches and was written. `None` if not searched.
    written: Option<UnitSet>,
}

impl FoundUnits {
    fn new(linear: &LinearMemory, unit: u64) -> Self {
        Self {
            unit,
            matching: UnitSet::empty(linear.bytes() / unit),
            written: None,
        }
    }
}

/// Adds the units with at least one page that matches the filter to `found`.
fn scan_units(
    pagemap: &File,
    linear: &LinearMemory,
    pages: PageFilter,
    found: &mut FoundUnits,
) -> Result<(), Errno> {
    for (first, chunks, host) in linear.extents(0..linear.chunks()) {
        let part = ScanRegion {
            first: first * (CHUNK_SIZE / found.unit),
            start: u64::try_from(host.addr()).map_err(|_| Errno::EOVERFLOW)?,
            bytes: chunks * CHUNK_SIZE,
        };
        match scan_by_ioctl(pagemap, &part, pages, found) {
            // Kernels before 6.7 do not support the request.
            Err(Errno::ENOTTY | Errno::EINVAL) => scan_by_entries(pagemap, &part, pages, found)?,
            other => other?,
        }
    }
    Ok(())
}

/// Region of guest memory that is scanned.
struct ScanRegion {
    /// First unit of the region.
    first: u64,
    start: u64,
    bytes: u64,
}

impl ScanRegion {
    /// Records the range of addresses that the kernel reported, in units. `is_written` states
    /// whether the guest may have written the range.
    fn mark(&self, found: &mut FoundUnits, start: u64, end: u64, is_written: bool) {
        let from = (start - self.start) / found.unit;
        let to = (end - self.start).div_ceil(found.unit);
        let units = self.first + from..self.first + to;
        found.matching.insert_range(units.clone());
        if let Some(written) = found.written.as_mut().filter(|_| is_written) {
            written.insert_range(units);
        }
    }
}

/// Scans a region with the ioctl `PAGEMAP_SCAN` (Linux 6.7), which returns ranges of pages.
fn scan_by_ioctl(
    pagemap: &File,
    part: &ScanRegion,
    pages: PageFilter,
    found: &mut FoundUnits,
) -> Result<(), Errno> {
    let mut regions = vec![PageRegion::default(); SCAN_BATCH_RANGES];
    // A page must have none of these categories. Pages of a file are not private, and the shared
    // zero page was only read.
    let excluded = match pages {
        PageFilter::Private => FILE | PFNZERO,
        PageFilter::Present => PFNZERO,
    };
    let mut arg = PageScan {
        end: part.start + part.bytes,
        walk_end: part.start,
        vec: u64::try_from(regions.as_mut_ptr().addr()).map_err(|_| Errno::EOVERFLOW)?,
        vec_len: u64::try_from(SCAN_BATCH_RANGES).map_err(|_| Errno::EOVERFLOW)?,
        category_inverted: excluded,
        category_mask: excluded,
        // A private page that was swapped out is not present, but was written.
        category_anyof_mask: PRESENT | SWAPPED,
        // The kernel joins adjacent pages with equal reported categories to one range.
        return_mask: found
            .written
            .as_ref()
            .map_or(PRESENT, |_| PRESENT | WRITTEN),
        ..Default::default()
    };
    while arg.walk_end < arg.end {
        arg.start = arg.walk_end;
        // SAFETY: `arg` contains its own size, the address of `regions`, and the length of
        // `regions`. The kernel writes to both.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
        let count = usize::try_from(count).map_err(|_| Errno::last())?;
        for region in regions.iter().take(count) {
            // Only a page that is present and not written counts as unwritten. If the guest has
            // returned a protected page to the host, a marker of the protection remains. The kernel
            // then reports the page as swapped and not written, but its content has changed. Pages
            // that are swapped out count as written, too.
            let is_written = region.categories & (PRESENT | WRITTEN) != PRESENT;
            part.mark(found, region.start, region.end, is_written);
        }
        // The kernel made no progress. Stop instead of repeating the call forever.
        if arg.walk_end <= arg.start {
            break;
        }
    }
    Ok(())
}

/// Write-protects the `private` pages, so that [`scan_private`] finds the pages that are written
/// afterwards. Memory must be registered with a userfaultfd for write protection
/// ([`super::write_tracker`]). Pages of huge pages are not protected and count as written: a write
/// to a protected huge page would split it.
pub fn protect_private(
    pagemap: &File,
    linear: &LinearMemory,
    private: &UnitSet,
) -> Result<(), Errno> {
    let excluded = FILE | PFNZERO | HUGE;
    // Without an array for the result, the kernel would protect all pages, as if all matched.
    let mut regions = vec![PageRegion::default(); SCAN_BATCH_RANGES];
    let mut arg = PageScan {
        flags: PROTECT_MATCHING,
        vec: u64::try_from(regions.as_mut_ptr().addr()).map_err(|_| Errno::EOVERFLOW)?,
        vec_len: u64::try_from(SCAN_BATCH_RANGES).map_err(|_| Errno::EOVERFLOW)?,
        category_inverted: excluded,
        category_mask: excluded | WRITTEN,
        category_anyof_mask: PRESENT | SWAPPED,
        return_mask: PRESENT,
        ..Default::default()
    };
    // KVM searches its mappings of each scanned range, so ranges without private pages are skipped.
    let blocks = private.coarser(PROTECT_BLOCK_PAGES);
    for run in runs(&blocks, 0..blocks.units()) {
        let end = (run.end * PROTECT_BLOCK_PAGES).min(private.units());
        linear.each_extent_of_pages(run.start * PROTECT_BLOCK_PAGES..end, |_, bytes, host| {
            arg.walk_end = u64::try_from(host.addr()).map_err(|_| Errno::EOVERFLOW)?;
            arg.end = arg.walk_end + u64::try_from(bytes).map_err(|_| Errno::EOVERFLOW)?;
            while arg.walk_end < arg.end {
                arg.start = arg.walk_end;
                // SAFETY: as in `scan_by_ioctl`. The request changes only the protection of pages,
                // not their content.
                let done = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
                Errno::result(done)?;
                // The kernel made no progress. Fail, so that the next snapshot compares all private
                // pages: the pages that were not reached would count as written forever.
                if arg.walk_end <= arg.start {
                    return Err(Errno::EAGAIN);
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Scans a region by reading its entries in `/proc/PID/pagemap`, for kernels without
/// `PAGEMAP_SCAN`.
fn scan_by_entries(
    pagemap: &File,
    part: &ScanRegion,
    pages: PageFilter,
    found: &mut FoundUnits,
) -> Result<(), Errno> {
    let io = |e: std::io::Error| Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO));
    // Each entry of the pagemap file has 8 bytes.
    let page = u64::try_from(PAGE_BYTES).map_err(|_| Errno::EOVERFLOW)?;
    let mut buffer = vec![0; CHUNK_BYTES];
    let batch = u64::try_from(buffer.len() / 8).map_err(|_| Errno::EOVERFLOW)? * page;
    let mut at = part.start;
    let end = part.start + part.bytes;
    while at < end {
        let bytes = batch.min(end - at);
        let length = usize::try_from(bytes / page * 8).map_err(|_| Errno::EOVERFLOW)?;
        let entries = &mut buffer[..length];
        pagemap.read_exact_at(entries, at / page * 8).map_err(io)?;
        for (number, entry) in (0u64..).zip(entries.as_chunks().0) {
            let entry = u64::from_le_bytes(*entry);
            // Unlike `PAGEMAP_SCAN`, an entry identifies neither the zero page nor a protected
            // page. Such a page counts as private and written, which only causes an unnecessary
            // comparison.
            let is_used = entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0;
            if is_used && (pages == PageFilter::Present || entry & ENTRY_FILE == 0) {
                let start = at + number * page;
                part.mark(found, start, start + page, true);
            }
        }
        at += bytes;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::map_layers::{MAX_MAPPINGS, map_layers, plan_mappings};
    use super::super::memory_layers::{MemoryLayer, MemoryLayers};
    use super::*;
    use crate::memory;
    use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::tempfile::TempFile;

    #[test]
    fn only_written_pages_make_a_chunk_private_and_touched_ones_present() {
        let memory = memory::allocate(128).unwrap();
        let linear = LinearMemory::new(&memory).unwrap();
        let file = TempFile::new().unwrap().into_file();
        file.set_len(linear.bytes()).unwrap();
        let mut index = LayerIndex::empty(MEMORY_CHUNK, linear.bytes());
        index.stored.insert_range(0..64);
        let layers =
            MemoryLayers::new(vec![MemoryLayer::new(file, index)], linear.bytes()).unwrap();
        let plan = plan_mappings(layers.runs(linear.chunks()), None, MAX_MAPPINGS);
        map_layers(&plan, &layers, &linear).unwrap();
        memory.write_obj(1u8, GuestAddress(5 * CHUNK_SIZE)).unwrap();
        memory
            .write_obj(1u8, GuestAddress(1000 * CHUNK_SIZE))
            .unwrap();
        let _: u8 = memory.read_obj(GuestAddress(40 * CHUNK_SIZE)).unwrap();

        let pagemap = File::open("/proc/self/pagemap").unwrap();
        type Scan = fn(&File, &ScanRegion, PageFilter, &mut FoundUnits) -> Result<(), Errno>;
        for scan_pagemap in [scan_by_ioctl as Scan, scan_by_entries as Scan] {
            let find = |pages| {
                let mut found = FoundUnits::new(&linear, CHUNK_SIZE);
                let (first, _, host) = linear.extents(0..linear.chunks()).next().unwrap();
                let part = ScanRegion {
                    first,
                    start: u64::try_from(host.addr()).unwrap(),
                    bytes: linear.bytes(),
                };
                match scan_pagemap(&pagemap, &part, pages, &mut found) {
                    // The kernel of this machine only supports the other interface.
                    Err(Errno::ENOTTY) => None,
                    other => other.map(|()| Some(found.matching)).unwrap(),
                }
            };
            if let (Some(private), Some(present)) =
                (find(PageFilter::Private), find(PageFilter::Present))
            {
                assert!(private.contains(5) && private.contains(1000));
                assert!(!private.contains(40) && !private.contains(6));
                assert!(present.contains(40) && !present.contains(2000));
            }
        }
        assert!(
            scan_pagemap(&pagemap, &linear, PageFilter::Private)
                .unwrap()
                .contains(5)
        );
        let written = scan_pages(&pagemap, &linear, PageFilter::Private).unwrap();
        assert!(written.contains(5 * 16) && !written.contains(5 * 16 + 1));
    }
}
