//! Copies of the pages that a restored guest writes first, made in one go.
//!
//! A page of a mapped layer costs a guest that writes to it up to three exits: the mapping of the
//! layer's page, its copy, and the mapping of that. A copy that is there before the guest runs
//! costs one, and KVM maps up to seven neighbours along with it.

use super::linear_memory::{CHUNK_SIZE, LinearMemory};
use super::map_layers::MappingPlan;
use jiffy_proto::layer::{MEMORY_PAGE, UnitSet};
use std::ops::Range;

const PAGE: u64 = MEMORY_PAGE as u64;
const CHUNK_PAGES: u64 = CHUNK_SIZE / PAGE;

/// Makes those of `pages` that `plan` maps private copies. A hint: a page that cannot be copied now
/// is copied when it is written to.
pub fn populate(plan: &MappingPlan, pages: &UnitSet, linear: &LinearMemory) {
    for (_, run) in &plan.map {
        for (first, chunks, host) in linear.extents(run.clone()) {
            let start = first * CHUNK_PAGES;
            for run in runs(pages, start..start + chunks * CHUNK_PAGES) {
                let offset = usize::try_from((run.start - start) * PAGE);
                let length = usize::try_from((run.end - run.start) * PAGE);
                if let (Ok(offset), Ok(length)) = (offset, length) {
                    // SAFETY: the range lies inside guest memory, which is private and not in use
                    // yet; its contents stay the same.
                    let _ = unsafe {
                        libc::madvise(host.add(offset).cast(), length, libc::MADV_POPULATE_WRITE)
                    };
                }
            }
        }
    }
}

/// Runs of units in `range` that are in `set`.
pub(super) fn runs(set: &UnitSet, range: Range<u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for unit in set.iter_range(range) {
        match runs.last_mut() {
            Some(run) if run.end == unit => run.end += 1,
            _ => runs.push(unit..unit + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::super::map_layers::{MAX_MAPPINGS, map_layers, plan_mappings};
    use super::super::memory_layers::{MemoryLayer, MemoryLayers};
    use super::super::pagemap_scan::{PageFilter, scan_pages};
    use super::*;
    use crate::memory;
    use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::tempfile::TempFile;

    #[test]
    fn wanted_pages_of_mapped_chunks_are_copied_and_no_others() {
        let memory = memory::allocate(128).unwrap();
        let linear = LinearMemory::new(&memory).unwrap();
        let file = TempFile::new().unwrap().into_file();
        file.set_len(linear.bytes()).unwrap();
        file.write_all_at(&[7; 4096], 17 * PAGE).unwrap();
        let mut index = LayerIndex::empty(MEMORY_CHUNK, linear.bytes());
        index.stored.insert_range(1..3);
        let layers =
            MemoryLayers::new(vec![MemoryLayer::new(file, index)], linear.bytes()).unwrap();
        let plan = plan_mappings(layers.runs(linear.chunks()), None, MAX_MAPPINGS);
        map_layers(&plan, &layers, &linear).unwrap();

        let mut pages = UnitSet::empty(linear.bytes() / PAGE);
        pages.insert_range(15..19);
        pages.insert(40);
        pages.insert(700);
        populate(&plan, &pages, &linear);
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let copied = scan_pages(&pagemap, &linear, PageFilter::Private).unwrap();
        assert_eq!(copied.iter().collect::<Vec<_>>(), [16, 17, 18, 40]);
        assert_eq!(
            memory.read_obj::<u8>(GuestAddress(17 * PAGE + 5)).unwrap(),
            7
        );
    }
}
