//! Compares reverted memory with restored memory.
//!
//! A *layer* is the part of a memory that one snapshot stores: the chunks (64 KiB each) that differ
//! from its ancestors. A *private* page belongs to this process alone, because a guest has written
//! it or the VMM has copied it.
//!
//! *Captured* pages were private when the target snapshot was taken of this memory. *Unwritten*
//! pages are private and have the content of the target. *Retainable* pages may remain private
//! after a revert, because a restored guest writes them first: their content is read again.

use super::super::layer_output::LayerOutput;
use super::super::layer_writer::{LayerSource, LayerWriter};
use super::super::map_layers::{MAX_MAPPINGS, plan_mappings};
use super::super::memory_layers::MemoryLayer;
use super::super::pagemap_scan::{PageFilter, scan_pages, scan_private};
use super::super::write_tracker::WriteTracker;
use super::*;
use crate::GuestMemory;
use crate::memory;
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
use std::fs::File;
use std::os::unix::fs::FileExt;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::tempfile::TempFile;

/// Size of the memory in MiB and in chunks.
const MIB: u32 = 128;
const CHUNKS: u64 = 2048;

/// Linear congruential generator (Knuth, MMIX).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Returns a layer's file and index. `fill` distinguishes its content from other layers.
fn layer(numbers: &mut Numbers, fill: u8) -> (File, LayerIndex) {
    let file = TempFile::new().unwrap().into_file();
    file.set_len(CHUNKS * CHUNK_SIZE).unwrap();
    let mut index = LayerIndex::empty(MEMORY_CHUNK, CHUNKS * CHUNK_SIZE);
    for _ in 0..20 {
        let start = numbers.below(CHUNKS - 16);
        for chunk in start..start + 1 + numbers.below(16) {
            if index.decides(chunk) {
                continue;
            }
            if numbers.below(4) == 0 {
                index.zero.insert(chunk);
            } else {
                index.stored.insert(chunk);
                file.write_all_at(&[fill; 65536], chunk * CHUNK_SIZE)
                    .unwrap();
            }
        }
    }
    (file, index)
}

/// Returns the layers of a memory, oldest first.
fn layers(of: &[&(File, LayerIndex)]) -> MemoryLayers {
    let layers = of.iter().map(|(file, index)| {
        // Duplicate the descriptor: files are identified by device and inode.
        MemoryLayer::new(file.try_clone().unwrap(), index.clone())
    });
    MemoryLayers::new(layers.collect(), CHUNKS * CHUNK_SIZE).unwrap()
}

/// Returns the whole content of a memory.
fn bytes(memory: &GuestMemory) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(CHUNKS * CHUNK_SIZE).unwrap()];
    memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    bytes
}

/// Opens the kernel's description of the pages of this process.
fn pagemap() -> File {
    File::open("/proc/self/pagemap").unwrap()
}

/// Returns the private pages of a memory, as a snapshot finds them.
fn found(linear: &LinearMemory) -> PrivatePagesFound {
    scan_private(&pagemap(), linear).unwrap()
}

fn private(linear: &LinearMemory) -> UnitSet {
    found(linear).all
}

/// Accesses memory like a guest: writes and reads anywhere, and returns memory like a balloon.
fn disturb(memory: &GuestMemory, linear: &LinearMemory, numbers: &mut Numbers) {
    disturb_and_note(memory, linear, numbers, &mut none());
}

/// Same as [`disturb`]. `returned` are the pages that were returned and not written since.
fn disturb_and_note(
    memory: &GuestMemory,
    linear: &LinearMemory,
    numbers: &mut Numbers,
    returned: &mut UnitSet,
) {
    for _ in 0..300 {
        let at = GuestAddress(numbers.below(CHUNKS * CHUNK_SIZE - 8192));
        let length = usize::try_from(numbers.below(8192)).unwrap();
        match numbers.below(8) {
            0 => drop(memory.read_obj::<u8>(at).unwrap()),
            1 => {
                let first = at.0 / PAGE;
                let end = (first + 1 + numbers.below(40)).min(returned.units());
                drop_pages(linear, first..end).unwrap();
                returned.insert_range(first..end);
            }
            _ => {
                let fill = u8::try_from(numbers.below(256)).unwrap();
                memory.write_slice(&vec![fill; length], at).unwrap();
                let end = (at.0 + length as u64).div_ceil(PAGE);
                (at.0 / PAGE..end).for_each(|page| returned.remove(page));
            }
        }
    }
}

#[test]
fn reverted_memory_equals_restored_memory() {
    let mut numbers = Numbers(7);
    let files: Vec<_> = (1..=4).map(|fill| layer(&mut numbers, fill)).collect();
    let [a, b, c, d] = &files[..] else { panic!() };
    // A snapshot, its descendants, a relative, and an unrelated snapshot.
    let snapshots: [&[&(File, LayerIndex)]; 5] = [&[a], &[a, b], &[a, b, c], &[a, c], &[d]];
    // With few mappings, the plan reads some chunks.
    let budgets = [MAX_MAPPINGS, 16];
    let plan = |layers: &MemoryLayers, budget| plan_mappings(layers.runs(CHUNKS), None, budget);
    let expected: Vec<Vec<u8>> = snapshots
        .iter()
        .map(|of| {
            let memory = memory::allocate(MIB).unwrap();
            let linear = LinearMemory::new(&memory).unwrap();
            let layers = layers(of);
            map_layers(&plan(&layers, MAX_MAPPINGS), &layers, &linear).unwrap();
            bytes(&memory)
        })
        .collect();

    let memory = memory::allocate(MIB).unwrap();
    let linear = LinearMemory::new(&memory).unwrap();
    let mut mapped = MappedFiles::default();
    let mut often_written = UnitSet::empty(CHUNKS * CHUNK_PAGES);
    for _ in 0..2000 {
        let page = numbers.below(CHUNKS * CHUNK_PAGES - 4);
        often_written.insert_range(page..page + 1 + numbers.below(4));
    }
    for round in 0..24 {
        let at = usize::try_from(numbers.below(5)).unwrap();
        let budget = budgets[usize::try_from(numbers.below(2)).unwrap()];
        disturb(&memory, &linear, &mut numbers);
        let layers = layers(snapshots[at]);
        let plan = plan(&layers, budget);
        let retainable = (numbers.below(2) == 0).then_some(&often_written);
        let own = PrivatePages {
            current: &private(&linear),
            unwritten: &none(),
            retainable,
            captured: None,
            protected: false,
        };
        let reverted = revert_memory(&mapped, &plan, &layers, &linear, own);
        mapped = reverted.unwrap().0;
        // Chunks that are read create huge pages, which extend beyond them.
        if plan.copy.is_empty() {
            let remaining = private(&linear);
            let is_retainable = |page| retainable.is_some_and(|pages| pages.contains(page));
            let wrong = remaining.iter().find(|page| !is_retainable(*page));
            assert_eq!(wrong, None, "round {round}: a page is still private");
        }
        assert!(
            bytes(&memory) == expected[at],
            "round {round}: not snapshot {at}"
        );
    }
}

#[test]
fn pages_that_were_only_read_remain_mapped_after_a_revert() {
    let mut numbers = Numbers(3);
    let (a, b) = (layer(&mut numbers, 1), layer(&mut numbers, 2));
    let memory = memory::allocate(MIB).unwrap();
    let linear = LinearMemory::new(&memory).unwrap();
    let newest = layers(&[&a, &b]);
    let plan = plan_mappings(newest.runs(CHUNKS), None, MAX_MAPPINGS);
    map_layers(&plan, &newest, &linear).unwrap();
    let mapped = MappedFiles::of(&plan, &newest).unwrap();

    let oldest = layers(&[&a]);
    let plan = plan_mappings(oldest.runs(CHUNKS), None, MAX_MAPPINGS);
    let chunk = a.1.stored.iter().find(|&c| !b.1.decides(c)).unwrap();
    let read = GuestAddress(chunk * CHUNK_SIZE);
    let written = GuestAddress(chunk * CHUNK_SIZE + 5 * PAGE);
    assert_eq!(memory.read_obj::<u8>(read).unwrap(), 1);
    memory.write_obj(9u8, written).unwrap();
    let present = || {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        scan_pages(&pagemap, &linear, PageFilter::Present).unwrap()
    };
    let current = private(&linear);
    assert_eq!(
        current.iter().collect::<Vec<_>>(),
        [chunk * CHUNK_PAGES + 5]
    );
    let own = PrivatePages {
        current: &current,
        unwritten: &none(),
        retainable: None,
        captured: None,
        protected: true,
    };
    revert_memory(&mapped, &plan, &oldest, &linear, own).unwrap();
    assert!(present().contains(chunk * CHUNK_PAGES));
    assert!(!present().contains(chunk * CHUNK_PAGES + 5));
    assert_eq!(memory.read_obj::<u8>(written).unwrap(), 1);
}

#[test]
fn pages_that_a_guest_writes_first_are_read_again_and_remain_private() {
    let mut numbers = Numbers(5);
    let a = layer(&mut numbers, 1);
    let memory = memory::allocate(MIB).unwrap();
    let linear = LinearMemory::new(&memory).unwrap();
    let layers = layers(&[&a]);
    let plan = plan_mappings(layers.runs(CHUNKS), None, MAX_MAPPINGS);
    map_layers(&plan, &layers, &linear).unwrap();
    let mapped = MappedFiles::of(&plan, &layers).unwrap();
    let first = a.1.stored.iter().next().unwrap() * CHUNK_PAGES;
    let at = |page| GuestAddress(page * PAGE + 7);
    let mut retainable = UnitSet::empty(CHUNKS * CHUNK_PAGES);
    retainable.insert_range(first + 1..first + 3);
    for page in first..first + 2 {
        memory.write_obj(9u8, at(page)).unwrap();
    }
    let own = PrivatePages {
        current: &private(&linear),
        unwritten: &none(),
        retainable: Some(&retainable),
        captured: None,
        protected: true,
    };
    let reverted = revert_memory(&mapped, &plan, &layers, &linear, own);
    let retained = reverted.unwrap().1;
    assert_eq!(retained.iter().collect::<Vec<_>>(), [first + 1]);
    let read: Vec<u8> = (first..first + 3)
        .map(|page| memory.read_obj(at(page)).unwrap())
        .collect();
    assert_eq!(read, [1, 1, 1]);
    assert_eq!(private(&linear).iter().collect::<Vec<_>>(), [first + 1]);
}

/// Takes a snapshot of `memory` that stores all chunks with private pages.
fn capture(memory: &GuestMemory, own: &UnitSet) -> (File, LayerIndex) {
    let file = TempFile::new().unwrap().into_file();
    file.set_len(CHUNKS * CHUNK_SIZE).unwrap();
    let mut index = LayerIndex::empty(MEMORY_CHUNK, CHUNKS * CHUNK_SIZE);
    for chunk in own.coarser(CHUNK_PAGES).iter() {
        let mut content = vec![0; usize::try_from(CHUNK_SIZE).unwrap()];
        let at = GuestAddress(chunk * CHUNK_SIZE);
        memory.read_slice(&mut content, at).unwrap();
        if content.iter().all(|byte| *byte == 0) {
            index.zero.insert(chunk);
        } else {
            index.stored.insert(chunk);
            file.write_all_at(&content, chunk * CHUNK_SIZE).unwrap();
        }
    }
    (file, index)
}

#[test]
fn repeated_reverts_to_the_captured_snapshot_retain_mappings() {
    let mut numbers = Numbers(11);
    let base = [layer(&mut numbers, 1), layer(&mut numbers, 2)];
    let memory = memory::allocate(MIB).unwrap();
    let linear = LinearMemory::new(&memory).unwrap();
    let below = layers(&[&base[0], &base[1]]);
    let plan = plan_mappings(below.runs(CHUNKS), None, MAX_MAPPINGS);
    map_layers(&plan, &below, &linear).unwrap();
    let mut mapped = MappedFiles::of(&plan, &below).unwrap();
    let original = bytes(&memory);

    disturb(&memory, &linear, &mut numbers);
    let own = private(&linear);
    let first = capture(&memory, &own);
    // A kernel that cannot track writes reverts all private pages.
    let tracker = WriteTracker::new();
    let tracked = protect(tracker.as_ref(), &linear);
    let captured = CapturedPages::new(&first.0, own, tracked).unwrap();
    let expected = bytes(&memory);
    let (mut mapped_below, mut remapped, mut unchanged) = (0, 0, 0);
    for round in 0..12 {
        disturb(&memory, &linear, &mut numbers);
        let top = layers(&[&base[0], &base[1], &first]);
        assert!(captured.belong_to(&top) && !captured.belong_to(&below));
        let plan = plan_mappings(top.runs(CHUNKS), None, MAX_MAPPINGS);
        let current = found(&linear);
        let unwritten = captured.unwritten(&current);
        let current = current.all;
        unchanged += unwritten.count();
        let own = PrivatePages {
            current: &current,
            unwritten: &unwritten,
            retainable: None,
            captured: Some(&captured),
            protected: true,
        };
        let to = MappedFiles::of(&plan, &top).unwrap();
        let before = mapped.clone();
        let (after, retained) = revert_memory(&mapped, &plan, &top, &linear, own).unwrap();
        mapped = after;
        assert!(bytes(&memory) == expected, "round {round}");
        for (file, run) in &to.0 {
            let is_captured = *file == captured.layer;
            for chunk in run.clone().filter(|_| is_captured) {
                let pages = chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES;
                let all_private = captured.own.iter_range(pages.clone());
                let all_private = all_private.into_iter().all(|page| current.contains(page));
                let file_at = |files: &MappedFiles| {
                    let mut runs = files.0.iter();
                    let run = runs.find(|(_, run)| run.contains(&chunk));
                    run.map(|(file, _)| *file)
                };
                if file_at(&before) == Some(*file) {
                    assert_eq!(file_at(&mapped), Some(*file));
                } else if all_private {
                    mapped_below += 1;
                    assert_eq!(file_at(&mapped), file_at(&before), "chunk {chunk}");
                    let read = |page| !current.contains(page) || retained.contains(page);
                    assert!(pages.clone().all(read), "chunk {chunk}");
                } else {
                    remapped += 1;
                    assert_eq!(file_at(&mapped), Some(*file), "chunk {chunk}");
                }
            }
        }
    }
    // Check that the random contents have covered both cases: chunks that retain a mapping below,
    // and chunks that are mapped again.
    assert!(mapped_below > 100 && remapped > 10);
    assert_eq!(unchanged > 1000, tracked, "{unchanged} unwritten pages");

    // Revert to another snapshot: the captured pages must not be used afterwards.
    disturb(&memory, &linear, &mut numbers);
    let plan = plan_mappings(below.runs(CHUNKS), None, MAX_MAPPINGS);
    let own = PrivatePages {
        current: &private(&linear),
        unwritten: &none(),
        retainable: None,
        captured: None,
        protected: true,
    };
    revert_memory(&mapped, &plan, &below, &linear, own).unwrap();
    assert!(bytes(&memory) == original);
}

/// Returns an empty set of pages.
fn none() -> UnitSet {
    UnitSet::empty(CHUNKS * CHUNK_PAGES)
}

/// Starts to track writes. Returns false if this kernel cannot track them.
fn protect(tracker: Option<&WriteTracker>, linear: &LinearMemory) -> bool {
    let protect = |tracker: &WriteTracker| tracker.protect(&pagemap(), linear, &private(linear));
    tracker.map(protect).transpose().unwrap().is_some()
}

/// Takes a snapshot with the writer of snapshots. Returns its layer, and the number of pages that
/// it compared.
fn take(
    linear: &LinearMemory,
    mapped: &MappedFiles,
    layers: &MemoryLayers,
    captured: Option<&CapturedPages>,
) -> ((File, LayerIndex), u64) {
    let current = found(linear);
    let mut pages = pages_to_compare(&current.all, mapped, layers, captured).unwrap();
    if let Some(captured) = captured {
        pages = pages.without(&captured.unwritten(&current));
    }
    let candidates = pages.coarser(CHUNK_PAGES);
    let source = LayerSource {
        linear,
        layers,
        candidates: &candidates,
        pages: &pages,
        hashes: None,
    };
    let files = [(); 2].map(|()| TempFile::new().unwrap().into_file());
    let [file, index_file] = files;
    let output = LayerOutput::new(&file, None);
    let mut writer = LayerWriter::new(source, output, &index_file);
    writer.write().unwrap();
    let index = writer.index();
    ((file, index), pages.count())
}

#[test]
fn snapshots_that_compare_private_pages_equal_memory() {
    let mut numbers = Numbers(13);
    let base = [layer(&mut numbers, 1), layer(&mut numbers, 2)];
    let memory = memory::allocate(MIB).unwrap();
    let linear = LinearMemory::new(&memory).unwrap();
    let below = layers(&[&base[0], &base[1]]);
    let plan = plan_mappings(below.runs(CHUNKS), None, MAX_MAPPINGS);
    map_layers(&plan, &below, &linear).unwrap();
    let mut mapped = MappedFiles::of(&plan, &below).unwrap();

    let mut taken: Vec<(File, LayerIndex)> = base.into();
    let mut captured: Option<CapturedPages> = None;
    let tracker = WriteTracker::new();
    let (mut compared, mut all) = (0, 0);
    let mut returned = none();
    for round in 0..16 {
        disturb_and_note(&memory, &linear, &mut numbers, &mut returned);
        let current = private(&linear);
        let candidates = current.coarser(CHUNK_PAGES);
        let below = layers(&taken.iter().collect::<Vec<_>>());
        let (snapshot, pages) = take(&linear, &mapped, &below, captured.as_ref());
        compared += pages;
        all += candidates.count() * CHUNK_PAGES;
        // A kernel without tracking compares all private pages, as in every fourth round.
        let tracked = round % 4 != 3 && protect(tracker.as_ref(), &linear);
        captured = Some(CapturedPages::new(&snapshot.0, current, tracked).unwrap());
        taken.push(snapshot);

        let top = layers(&taken.iter().collect::<Vec<_>>());
        let plan = plan_mappings(top.runs(CHUNKS), None, MAX_MAPPINGS);
        let restored = memory::allocate(MIB).unwrap();
        map_layers(&plan, &top, &LinearMemory::new(&restored).unwrap()).unwrap();
        let (expected, restored) = (bytes(&memory), bytes(&restored));
        // The content of pages that the guest has returned is undefined.
        for page in 0..CHUNKS * CHUNK_PAGES {
            let at = usize::try_from(page * PAGE).unwrap();
            let part = at..at + usize::try_from(PAGE).unwrap();
            let equal = expected[part.clone()] == restored[part];
            assert!(
                equal || returned.contains(page),
                "round {round}: page {page}"
            );
        }
        if round % 5 == 4 {
            disturb(&memory, &linear, &mut numbers);
            let current = found(&linear);
            let unwritten = captured.as_ref().unwrap().unwritten(&current);
            let current = current.all;
            let own = PrivatePages {
                current: &current,
                unwritten: &unwritten,
                retainable: None,
                captured: captured.as_ref(),
                protected: true,
            };
            mapped = revert_memory(&mapped, &plan, &top, &linear, own).unwrap().0;
        }
    }
    // Many chunks of this guest have few private pages.
    assert!(compared * 4 < all * 3, "compared {compared} of {all} pages");
}
