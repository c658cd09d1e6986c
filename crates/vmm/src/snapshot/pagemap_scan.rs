//! Search for private or present pages of guest memory. A chunk with private pages may differ from
//! the layers below, so a snapshot must compare it.

use super::linear_memory::{CHUNK_BYTES, CHUNK_SIZE, LinearMemory};
use jiffy_proto::layer::{MEMORY_PAGE, UnitSet};
use jiffy_proto::page_scan::{FILE, PAGEMAP_SCAN, PFNZERO, PRESENT, PageRegion, PageScan, SWAPPED};
use nix::errno::Errno;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Bits of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const ENTRY_FILE: u64 = 1 << 61;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_PRESENT: u64 = 1 << 63;
const PAGE_BYTES: usize = 4096;
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
    scan_units(pagemap, linear, pages, CHUNK_SIZE)
}

/// Returns the pages that match the filter. Each has [`MEMORY_PAGE`] bytes.
pub fn scan_pages(
    pagemap: &File,
    linear: &LinearMemory,
    pages: PageFilter,
) -> Result<UnitSet, Errno> {
    scan_units(pagemap, linear, pages, u64::from(MEMORY_PAGE))
}

/// Returns the units with at least one page that matches the filter. `unit` is the size of a unit
/// in bytes and divides the chunk size.
fn scan_units(
    pagemap: &File,
    linear: &LinearMemory,
    pages: PageFilter,
    unit: u64,
) -> Result<UnitSet, Errno> {
    let mut found = UnitSet::empty(linear.bytes() / unit);
    for (first, chunks, host) in linear.extents(0..linear.chunks()) {
        let part = ScanRegion {
            first: first * (CHUNK_SIZE / unit),
            unit,
            start: u64::try_from(host.addr()).map_err(|_| Errno::EOVERFLOW)?,
            bytes: chunks * CHUNK_SIZE,
        };
        match scan_by_ioctl(pagemap, &part, pages, &mut found) {
            // Kernels before 6.7 do not support the request.
            Err(Errno::ENOTTY | Errno::EINVAL) => {
                scan_by_entries(pagemap, &part, pages, &mut found)?
            }
            other => other?,
        }
    }
    Ok(found)
}

struct ScanRegion {
    first: u64,
    unit: u64,
    start: u64,
    bytes: u64,
}

impl ScanRegion {
    fn mark(&self, found: &mut UnitSet, start: u64, end: u64) {
        let from = (start - self.start) / self.unit;
        let to = (end - self.start).div_ceil(self.unit);
        found.insert_range(self.first + from..self.first + to);
    }
}

/// Scans a region with the ioctl `PAGEMAP_SCAN` (Linux 6.7), which returns ranges of pages.
fn scan_by_ioctl(
    pagemap: &File,
    part: &ScanRegion,
    pages: PageFilter,
    found: &mut UnitSet,
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
        return_mask: PRESENT,
        ..Default::default()
    };
    while arg.walk_end < arg.end {
        arg.start = arg.walk_end;
        // SAFETY: `arg` contains its own size, the address of `regions`, and the length of
        // `regions`. The kernel writes to both.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
        let count = usize::try_from(count).map_err(|_| Errno::last())?;
        for region in regions.iter().take(count) {
            part.mark(found, region.start, region.end);
        }
        // The kernel made no progress. Stop instead of repeating the call forever.
        if arg.walk_end <= arg.start {
            break;
        }
    }
    Ok(())
}

/// Scans a region by reading its entries in `/proc/PID/pagemap`, for kernels without
/// `PAGEMAP_SCAN`.
fn scan_by_entries(
    pagemap: &File,
    part: &ScanRegion,
    pages: PageFilter,
    found: &mut UnitSet,
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
            // Unlike `PAGEMAP_SCAN`, an entry does not identify the zero page. Such a page counts
            // as private, which only causes an unnecessary comparison.
            let is_used = entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0;
            if is_used && (pages == PageFilter::Present || entry & ENTRY_FILE == 0) {
                let start = at + number * page;
                part.mark(found, start, start + page);
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
        type Scan = fn(&File, &ScanRegion, PageFilter, &mut UnitSet) -> Result<(), Errno>;
        for scan_pagemap in [scan_by_ioctl as Scan, scan_by_entries as Scan] {
            let find = |pages| {
                let mut found = UnitSet::empty(linear.chunks());
                let (first, _, host) = linear.extents(0..linear.chunks()).next().unwrap();
                let part = ScanRegion {
                    first,
                    unit: CHUNK_SIZE,
                    start: u64::try_from(host.addr()).unwrap(),
                    bytes: linear.bytes(),
                };
                match scan_pagemap(&pagemap, &part, pages, &mut found) {
                    // The kernel of this machine only supports the other interface.
                    Err(Errno::ENOTTY) => None,
                    other => other.map(|()| Some(found)).unwrap(),
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
