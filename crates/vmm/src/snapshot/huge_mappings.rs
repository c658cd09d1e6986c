//! Huge pages for regions of mapped layers that a guest reads but does not write, such as the text
//! of its kernel. The host maps such a region with a huge page if its file system caches the file
//! in huge pages.
//!
//! A *chunk* is 64 KiB of memory or of a disk.
//!
//! Without nested page tables, KVM maps a guest's huge page in one exit if the host's page is also
//! huge. Otherwise each 4 KiB page takes an exit. A written page splits its region.

use super::linear_memory::{CHUNK_SIZE, LinearMemory};
use super::map_layers::MappingPlan;
use crate::memory::HUGE_PAGE_BYTES;
use jiffy_proto::layer::{MEMORY_PAGE, UnitSet};
use std::ops::Range;

/// Chunks of a huge page, and pages of a chunk.
const REGION_CHUNKS: u64 = HUGE_PAGE_BYTES as u64 / CHUNK_SIZE;
const CHUNK_PAGES: u64 = CHUNK_SIZE / MEMORY_PAGE as u64;

/// Requests huge pages for regions that `plan` maps from one file and that contain none of the
/// `written` pages. This is a hint: the guest also runs without huge pages.
pub fn advise_huge_pages(plan: &MappingPlan, written: &UnitSet, linear: &LinearMemory) {
    for (_, run) in &plan.map {
        for (first, chunks, host) in linear.extents(run.clone()) {
            for region in unwritten_regions(first..first + chunks, host, written) {
                let offset = usize::try_from((region.start - first) * CHUNK_SIZE);
                let length = usize::try_from((region.end - region.start) * CHUNK_SIZE);
                if let (Ok(offset), Ok(length)) = (offset, length) {
                    // Ignore the error: kernels without huge pages for files reject the advice.
                    //
                    // SAFETY: the range is inside guest memory, and the advice does not change its
                    // content.
                    let _ = unsafe {
                        libc::madvise(host.add(offset).cast(), length, libc::MADV_HUGEPAGE)
                    };
                }
            }
        }
    }
}

/// Returns the runs of whole huge pages in `extent`, which starts at `host`, without `written`
/// pages.
fn unwritten_regions(extent: Range<u64>, host: *mut u8, written: &UnitSet) -> Vec<Range<u64>> {
    // Distance from the start of the extent to its first huge page boundary, in chunks. Extents
    // start at chunk boundaries, and huge pages consist of whole chunks.
    let skip = host.align_offset(HUGE_PAGE_BYTES) as u64 / CHUNK_SIZE;
    let mut regions: Vec<Range<u64>> = Vec::new();
    let mut start = extent.start + skip;
    while start + REGION_CHUNKS <= extent.end {
        let end = start + REGION_CHUNKS;
        let pages = start * CHUNK_PAGES..end * CHUNK_PAGES;
        if written.iter_range(pages).next().is_none() {
            // Merge adjacent regions: each call of madvise may split a mapping.
            match regions.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => regions.push(start..end),
            }
        }
        start = end;
    }
    regions
}

#[cfg(test)]
mod tests {
    use super::super::map_layers::{MAX_MAPPINGS, map_layers, plan_mappings};
    use super::super::memory_layers::{MemoryLayer, MemoryLayers};
    use super::*;
    use crate::memory;
    use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
    use vmm_sys_util::tempfile::TempFile;

    /// Returns the ranges of this process's memory inside `[start, end)` that were advised to have
    /// huge pages. The ranges are relative to `start`, in MiB.
    fn advised(start: usize, end: usize) -> Vec<Range<usize>> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut found = Vec::new();
        let mut range = 0..0;
        for line in smaps.lines() {
            let address = |text| usize::from_str_radix(text, 16).ok();
            let head = line.split(' ').next().and_then(|head| head.split_once('-'));
            if let Some((from, to)) = head.and_then(|(a, b)| address(a).zip(address(b))) {
                range = from..to;
            } else if line.starts_with("VmFlags:")
                && line.contains(" hg")
                && (start..end).contains(&range.start)
            {
                found.push((range.start - start) >> 20..(range.end.min(end) - start) >> 20);
            }
        }
        found
    }

    #[test]
    fn only_unwritten_huge_pages_of_a_layer_are_advised() {
        let memory = memory::allocate(128).unwrap();
        let linear = LinearMemory::new(&memory).unwrap();
        let file = TempFile::new().unwrap().into_file();
        file.set_len(linear.bytes()).unwrap();
        let mut index = LayerIndex::empty(MEMORY_CHUNK, linear.bytes());
        let chunks_per_mib = (1 << 20) / CHUNK_SIZE;
        // From 3 to 13 MiB.
        index
            .stored
            .insert_range(3 * chunks_per_mib..13 * chunks_per_mib);
        let layers =
            MemoryLayers::new(vec![MemoryLayer::new(file, index)], linear.bytes()).unwrap();
        let plan = plan_mappings(layers.runs(linear.chunks()), None, MAX_MAPPINGS);
        map_layers(&plan, &layers, &linear).unwrap();
        let mut written = UnitSet::empty(linear.bytes() / MEMORY_PAGE as u64);
        // The offset is 7 MiB.
        written.insert(7 * chunks_per_mib * CHUNK_PAGES);
        advise_huge_pages(&plan, &written, &linear);
        let start = linear.chunk(0).unwrap().addr();
        let (from, to) = (start + (3 << 20), start + (13 << 20));
        let mib = |range: Range<usize>| range.start + 3..range.end + 3;
        let found: Vec<_> = advised(from, to).into_iter().map(mib).collect();
        assert_eq!(found, [4..6, 8..12]);
    }
}
