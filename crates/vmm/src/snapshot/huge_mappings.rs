//! Regions of mapped layers that a guest reads and does not write, as the text of its kernel: the
//! host maps them in huge pages where its file system keeps them so.
//!
//! KVM without nested page tables maps a guest's huge page in one exit where the host's page is
//! huge, too, and in one exit for each 4 KiB otherwise. A page that is written to splits its
//! region.

use super::linear_memory::{CHUNK_SIZE, LinearMemory};
use super::map_layers::MappingPlan;
use crate::memory::HUGE_PAGE_BYTES;
use jiffy_proto::layer::{MEMORY_PAGE, UnitSet};
use std::ops::Range;

const REGION_CHUNKS: u64 = HUGE_PAGE_BYTES as u64 / CHUNK_SIZE;
const CHUNK_PAGES: u64 = CHUNK_SIZE / MEMORY_PAGE as u64;

/// Asks for huge pages in the regions that `plan` maps from one file as a whole and that have none
/// of the `written` pages. A hint: without huge pages the guest runs as well.
pub fn advise_huge_pages(plan: &MappingPlan, written: &UnitSet, linear: &LinearMemory) {
    for (_, run) in &plan.map {
        for (first, chunks, host) in linear.extents(run.clone()) {
            for region in unwritten_regions(first..first + chunks, host, written) {
                let offset = usize::try_from((region.start - first) * CHUNK_SIZE);
                let length = usize::try_from((region.end - region.start) * CHUNK_SIZE);
                if let (Ok(offset), Ok(length)) = (offset, length) {
                    // SAFETY: the range lies inside guest memory; the advice changes no content.
                    let _ = unsafe {
                        libc::madvise(host.add(offset).cast(), length, libc::MADV_HUGEPAGE)
                    };
                }
            }
        }
    }
}

/// Runs of whole huge pages in `extent`, which begins at `host`, without `written` pages.
fn unwritten_regions(extent: Range<u64>, host: *mut u8, written: &UnitSet) -> Vec<Range<u64>> {
    let skip = host.align_offset(HUGE_PAGE_BYTES) as u64 / CHUNK_SIZE;
    let mut regions: Vec<Range<u64>> = Vec::new();
    let mut start = extent.start + skip;
    while start + REGION_CHUNKS <= extent.end {
        let end = start + REGION_CHUNKS;
        let pages = start * CHUNK_PAGES..end * CHUNK_PAGES;
        if written.iter_range(pages).next().is_none() {
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

    /// Ranges of this process's memory that were advised to have huge pages and lie in `[start,
    /// end)`, from the first byte, in MiB.
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
    fn whole_huge_pages_of_a_layer_that_nobody_writes_are_advised_and_no_others() {
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
        // At 7 MiB.
        written.insert(7 * chunks_per_mib * CHUNK_PAGES);
        advise_huge_pages(&plan, &written, &linear);
        let start = linear.chunk(0).unwrap().addr();
        let (from, to) = (start + (3 << 20), start + (13 << 20));
        let mib = |range: Range<usize>| range.start + 3..range.end + 3;
        let found: Vec<_> = advised(from, to).into_iter().map(mib).collect();
        assert_eq!(found, [4..6, 8..12]);
    }
}
