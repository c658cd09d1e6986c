//! Copies the pages that a restored guest writes first, before or while it runs, so that these
//! writes cause no copy-on-write faults.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors.
//!
//! The first write to a page of a mapped layer costs up to three exits: mapping the layer's page,
//! copying it, and mapping the copy. If the copy exists before the guest runs, the write costs one
//! exit, and KVM maps up to seven neighbours at the same time.

use super::linear_memory::{CHUNK_SIZE, LinearMemory};
use super::map_layers::MappingPlan;
use jiffy_proto::layer::{MEMORY_PAGE, UnitSet};
use jiffy_proto::snapshot::PopulateMoment;
use std::collections::VecDeque;
use std::ops::Range;

const CHUNK_PAGES: u64 = CHUNK_SIZE / MEMORY_PAGE as u64;
/// Maximum number of pages per step of deferred copies. With both limits, a step takes about 0.1
/// ms.
const STEP_PAGES: u64 = 64;
/// Maximum number of runs per step. Each run costs at least one system call.
const STEP_RUNS: usize = 32;

/// Makes private copies of the `pages` that `plan` maps. This is a hint: a page that cannot be
/// copied now is copied when the guest writes to it.
pub fn populate(plan: &MappingPlan, pages: &UnitSet, linear: &LinearMemory) {
    mapped_runs(plan, pages).for_each(|run| copy(linear, run));
}

/// Copies that are made while the guest runs, after a certain moment.
#[derive(Debug, Default)]
pub struct DeferredCopies {
    runs: VecDeque<Range<u64>>,
    /// Moment after which the copies are due. `None` if they are due already.
    awaited: Option<PopulateMoment>,
}

impl DeferredCopies {
    /// Plans copies of the `pages` that `plan` maps, after the moment `from`. [`Self::step`] makes
    /// them.
    pub fn of(plan: &MappingPlan, pages: &UnitSet, from: PopulateMoment) -> Self {
        Self {
            runs: mapped_runs(plan, pages).collect(),
            // Copies that are due from the start wait for no moment.
            awaited: Some(from).filter(|from| *from != PopulateMoment::Start),
        }
    }

    /// Records that `moment` has passed.
    pub fn on_moment(&mut self, moment: PopulateMoment) {
        self.awaited = self.awaited.filter(|awaited| *awaited != moment);
    }

    /// Returns whether copies are waiting for `moment`.
    pub fn is_waiting_for(&self, moment: PopulateMoment) -> bool {
        self.awaited == Some(moment) && !self.runs.is_empty()
    }

    /// Returns whether copies are due.
    pub fn are_due(&self) -> bool {
        self.awaited.is_none() && !self.runs.is_empty()
    }

    /// Makes some of the copies. The guest may run because the content does not change.
    pub fn step(&mut self, linear: &LinearMemory) {
        // Bound the time of a step: the event loop handles no event meanwhile.
        let mut budget = STEP_PAGES;
        for _ in 0..STEP_RUNS {
            let Some(mut run) = self.runs.pop_front() else {
                return;
            };
            let end = run.end.min(run.start + budget);
            copy(linear, run.start..end);
            budget -= end - run.start;
            run.start = end;
            // The rest of the run is copied by the next step.
            if !run.is_empty() {
                self.runs.push_front(run);
            }
            if budget == 0 {
                return;
            }
        }
    }
}

/// Returns the runs of `pages` that `plan` maps.
fn mapped_runs(plan: &MappingPlan, pages: &UnitSet) -> impl Iterator<Item = Range<u64>> {
    let mapped = plan.map.iter();
    mapped.flat_map(|(_, run)| runs(pages, run.start * CHUNK_PAGES..run.end * CHUNK_PAGES))
}

fn copy(linear: &LinearMemory, run: Range<u64>) {
    // Ignore the error: without a copy, the guest's first write to the page is only slower.
    let _ = linear.each_extent_of_pages(run, |_, bytes, host| {
        make_private(host, bytes);
        Ok(())
    });
}

/// Makes `bytes` bytes of guest memory at `host` private and writable in one call. This is a hint.
pub(super) fn make_private(host: *mut u8, bytes: usize) {
    // SAFETY: the range is inside guest memory, which is private. The content does not change.
    let _ = unsafe { libc::madvise(host.cast(), bytes, libc::MADV_POPULATE_WRITE) };
}

/// Returns the runs of units in `range` that are in `set`.
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
    use crate::{GuestMemory, memory};
    use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::tempfile::TempFile;

    const PAGE: u64 = MEMORY_PAGE as u64;

    /// Returns memory whose chunks 1 and 2 are mapped from a layer with a written page 17, and the
    /// plan.
    fn mapped() -> (GuestMemory, LinearMemory, MappingPlan) {
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
        (memory, linear, plan)
    }

    fn copied(linear: &LinearMemory) -> Vec<u64> {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let copied = scan_pages(&pagemap, linear, PageFilter::Private).unwrap();
        copied.iter().collect()
    }

    #[test]
    fn only_requested_pages_of_mapped_chunks_are_copied() {
        let (memory, linear, plan) = mapped();
        let mut pages = UnitSet::empty(linear.bytes() / PAGE);
        pages.insert_range(15..19);
        pages.insert(40);
        pages.insert(700);
        populate(&plan, &pages, &linear);
        assert_eq!(copied(&linear), [16, 17, 18, 40]);
        assert_eq!(
            memory.read_obj::<u8>(GuestAddress(17 * PAGE + 5)).unwrap(),
            7
        );
    }

    #[test]
    fn deferred_copies_are_made_in_short_steps() {
        let (_memory, linear, plan) = mapped();
        // 20 of the 32 mapped pages (16 to 47) are requested, in 13 runs. Both numbers are below
        // the limits of one step.
        let mut pages = UnitSet::empty(linear.bytes() / PAGE);
        pages.insert_range(8..24);
        (24..48).step_by(2).for_each(|page| pages.insert(page));
        let mut deferred = DeferredCopies::of(&plan, &pages, PopulateMoment::Frame);
        deferred.on_moment(PopulateMoment::Connection);
        assert!(!deferred.are_due() && deferred.is_waiting_for(PopulateMoment::Frame));
        deferred.on_moment(PopulateMoment::Frame);
        assert!(deferred.are_due());
        deferred.step(&linear);
        let expected: Vec<u64> = (16..24).chain((24..48).step_by(2)).collect();
        assert_eq!(copied(&linear), expected);
        assert!(!deferred.are_due());
        // A run that is longer than a step.
        let of = |runs: &[Range<u64>]| DeferredCopies {
            runs: runs.iter().cloned().collect(),
            awaited: None,
        };
        let end = 16 + STEP_PAGES + 8;
        let mut deferred = of(&[16..end, end..end + 1]);
        deferred.step(&linear);
        assert_eq!(deferred.runs, [end - 8..end, end..end + 1]);
        let mut many = of(&vec![16..17; STEP_RUNS + 1]);
        many.step(&linear);
        assert_eq!(many.runs.len(), 1);
    }
}
