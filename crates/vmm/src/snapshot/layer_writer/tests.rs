//! Tests of the writer of memory layers.
//!
//! A *layer* is the part of a memory that one snapshot stores: the chunks (64 KiB each) that differ
//! from its ancestors. A *candidate* is a chunk that may differ. The writer compares the pages of a
//! candidate that may have been written with the layers below.

use super::super::linear_memory::CHUNK_SIZE;
use super::super::map_layers::{MAX_MAPPINGS, map_layers, plan_mappings};
use super::super::memory_layers::MemoryLayer;
use super::*;
use crate::GuestMemory;
use crate::memory;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::tempfile::TempFile;

/// Fills a chunk of guest memory with `byte`.
fn fill(memory: &GuestMemory, chunk: u64, byte: u8) {
    let at = GuestAddress(chunk * CHUNK_SIZE);
    memory.write_slice(&[byte; CHUNK_BYTES], at).unwrap();
}

/// Returns a writer of the candidate chunks, of which `pages` were written.
fn writer<'a>(
    linear: &'a LinearMemory,
    layers: &'a MemoryLayers,
    (candidates, pages): (&'a UnitSet, &'a UnitSet),
    file: &'a File,
    index_file: &'a File,
) -> LayerWriter<'a> {
    let source = LayerSource {
        linear,
        layers,
        candidates,
        pages,
        hashes: None,
    };
    LayerWriter::new(source, LayerOutput::new(file, None), index_file)
}

/// Returns the set of all pages of a memory.
fn all_pages(linear: &LinearMemory) -> UnitSet {
    UnitSet::full(linear.bytes() / u64::from(MEMORY_PAGE))
}

/// Writes a layer of all changed chunks, and opens it.
fn save(memory: &GuestMemory, layers: &MemoryLayers) -> MemoryLayer {
    let linear = LinearMemory::new(memory).unwrap();
    save_pages(memory, layers, &all_pages(&linear))
}

/// Writes a layer of these pages, and opens it.
fn save_pages(memory: &GuestMemory, layers: &MemoryLayers, pages: &UnitSet) -> MemoryLayer {
    let linear = LinearMemory::new(memory).unwrap();
    let (file, index) = (TempFile::new().unwrap(), TempFile::new().unwrap());
    let candidates = pages.coarser(CHUNK_PAGES);
    let (file, index_file) = (file.into_file(), index.into_file());
    let sets = (&candidates, pages);
    let mut writer = writer(&linear, layers, sets, &file, &index_file);
    writer.write().unwrap();
    let index = writer.index();
    let mut written = vec![0; LayerIndex::encoded_len(linear.chunks())];
    index_file.read_exact_at(&mut written, 0).unwrap();
    let read = LayerIndex::decode_any(&written).unwrap();
    assert_eq!(read.of(MEMORY_CHUNK, linear.bytes()).unwrap(), index);
    MemoryLayer::new(file, index)
}

#[test]
fn a_layer_that_is_interrupted_at_a_deadline_is_completed_by_the_next_write() {
    let memory = memory::allocate(128).unwrap();
    let written = [3, 4, 5, 700, 1999];
    for chunk in written {
        fill(&memory, chunk, 7);
    }
    let linear = LinearMemory::new(&memory).unwrap();
    let (file, index_file) = (TempFile::new().unwrap(), TempFile::new().unwrap());
    let (file, index_file) = (file.into_file(), index_file.into_file());
    let pages = all_pages(&linear);
    let candidates = pages.coarser(CHUNK_PAGES);
    let layers = MemoryLayers::default();
    let mut writer = writer(&linear, &layers, (&candidates, &pages), &file, &index_file);
    // A deadline in the past writes nothing.
    assert!(!writer.write_until(Instant::now()).unwrap());
    assert_eq!(writer.next, 0);
    assert_eq!(writer.middle_chunk(), Some(1024));
    // Only chunk 3 is written.
    writer.write_range(0..4).unwrap();
    writer.next = 4;
    assert_eq!(writer.middle_chunk(), Some(1026));
    writer.write().unwrap();
    let stored: Vec<u64> = writer.index().stored.iter().collect();
    assert_eq!(stored, written);
    let mut chunk = vec![0; CHUNK_BYTES];
    for at in written {
        file.read_exact_at(&mut chunk, at * CHUNK_SIZE).unwrap();
        assert!(chunk.iter().all(|&byte| byte == 7), "chunk {at}");
    }
    let read = LayerIndex::read(&index_file, 1 << 20).unwrap();
    let stored = read.of(MEMORY_CHUNK, linear.bytes()).unwrap().stored;
    assert_eq!(stored.iter().collect::<Vec<_>>(), written);
}

#[test]
fn only_changed_chunks_are_stored_and_zero_chunks_take_no_space() {
    let memory = memory::allocate(128).unwrap();
    for chunk in [3, 4, 700] {
        fill(&memory, chunk, 7);
    }
    fill(&memory, 5, 0);
    let first = save(&memory, &MemoryLayers::default());
    assert_eq!(first.index.stored.iter().collect::<Vec<_>>(), [3, 4, 700]);
    assert_eq!(first.index.zero.count(), 0);
    assert_eq!(
        first.file.metadata().unwrap().blocks() * 512,
        3 * CHUNK_SIZE
    );

    let bytes = 128 << 20;
    let mut layers = MemoryLayers::new(vec![first], bytes).unwrap();
    fill(&memory, 3, 7);
    fill(&memory, 4, 0);
    memory
        .write_obj(1u8, GuestAddress(900 * CHUNK_SIZE + 77))
        .unwrap();
    let second = save(&memory, &layers);
    assert_eq!(second.index.stored.iter().collect::<Vec<_>>(), [900]);
    assert_eq!(second.index.zero.iter().collect::<Vec<_>>(), [4]);

    layers.push(second);
    let restored = memory::allocate(128).unwrap();
    let linear = LinearMemory::new(&restored).unwrap();
    let plan = plan_mappings(layers.runs(linear.chunks()), None, MAX_MAPPINGS);
    map_layers(&plan, &layers, &linear).unwrap();
    let at = |chunk| {
        restored
            .read_obj::<u8>(GuestAddress(chunk * CHUNK_SIZE + 77))
            .unwrap()
    };
    assert_eq!([3, 4, 700, 900].map(at), [7, 0, 7, 1]);
}

#[test]
fn a_chunk_is_stored_if_a_page_that_may_differ_differs() {
    let memory = memory::allocate(128).unwrap();
    let linear = LinearMemory::new(&memory).unwrap();
    (1..=4).for_each(|chunk| fill(&memory, chunk, 7));
    let mut layers = MemoryLayers::default();
    let first = save(&memory, &layers);
    layers.push(first);
    let write = |chunk, page| {
        let at = GuestAddress(chunk * CHUNK_SIZE + page * u64::from(MEMORY_PAGE) + 99);
        memory.write_obj(8u8, at).unwrap();
    };
    let mut pages = UnitSet::empty(linear.bytes() / u64::from(MEMORY_PAGE));
    let mut may_differ = |chunk, page| pages.insert(chunk * CHUNK_PAGES + page);
    // One page of each chunk differs: the first, the last, and one in the middle. All other pages
    // of the chunk may differ, but are equal.
    for (chunk, page) in [(1, 0), (2, 15), (3, 7)] {
        write(chunk, page);
        (0..CHUNK_PAGES).for_each(|equal| may_differ(chunk, equal));
    }
    // Chunk 4 has no page that differs, so it is not stored.
    may_differ(4, 2);
    may_differ(4, 3);
    // Chunks 9 and 10 are zero in the layer. Only chunk 9 has changed.
    write(9, 1);
    may_differ(9, 0);
    may_differ(9, 1);
    may_differ(10, 5);
    let second = save_pages(&memory, &layers, &pages);
    assert_eq!(second.index.stored.iter().collect::<Vec<_>>(), [1, 2, 3, 9]);
    assert_eq!(second.index.zero.count(), 0);
    let mut content = vec![0; CHUNK_BYTES];
    let of_chunk = 2 * CHUNK_SIZE;
    second.file.read_exact_at(&mut content, of_chunk).unwrap();
    let written = 15 * PAGE_BYTES + 99;
    let expected = |at| if at == written { 8 } else { 7 };
    assert!((0..).zip(&content).all(|(at, byte)| *byte == expected(at)));
}

#[test]
fn runs_of_pages_contain_each_page_once() {
    let of = |bits| -> Vec<usize> {
        let runs = page_runs(bits);
        runs.flat_map(|run| [run.start / PAGE_BYTES, run.end / PAGE_BYTES])
            .collect()
    };
    assert!(of(0).is_empty());
    assert_eq!(of(0xffff), [0, 16]);
    assert_eq!(of(0b1000_0110), [1, 3, 7, 8]);
    assert_eq!(of(1 << 15), [15, 16]);
}

#[test]
fn long_runs_bypass_the_page_cache_and_are_compared_by_hash() {
    let memory = memory::allocate(128).unwrap();
    let linear = LinearMemory::new(&memory).unwrap();
    (16u8..)
        .zip(64..192)
        .for_each(|(byte, chunk)| fill(&memory, chunk, byte));
    fill(&memory, 1000, 7);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memory");
    let mut both = File::options();
    both.read(true).write(true).create(true);
    let file = both.open(&path).unwrap();
    let direct = both.custom_flags(libc::O_DIRECT).open(&path).ok();
    let (all, mut layers) = (UnitSet::full(linear.chunks()), MemoryLayers::default());
    let pages = all_pages(&linear);
    let hashes = ChunkHashes::new(linear.chunks()).unwrap();
    let source = LayerSource {
        linear: &linear,
        layers: &layers,
        candidates: &all,
        pages: &pages,
        hashes: Some(&hashes),
    };
    let index_file = TempFile::new().unwrap().into_file();
    let output = LayerOutput::new(&file, direct.as_ref());
    let mut writer = LayerWriter::new(source, output, &index_file);
    // Two parts, as written by two forked processes. Such a process must not write shared pages
    // directly to the disk, but copies them to a bounce buffer first.
    writer.enable_bounce_buffer();
    writer.set_len().unwrap();
    writer.write_range(100..u64::MAX).unwrap();
    writer.write_range(0..100).unwrap();
    let index = writer.index();
    // The chunks 64 to 191, and chunk 1000.
    assert_eq!(index.stored.count(), 129);
    let mut read = vec![0; CHUNK_BYTES];
    for (byte, chunk) in (16u8..).zip(64..192).chain([(7, 1000)]) {
        file.read_exact_at(&mut read, chunk * CHUNK_SIZE).unwrap();
        assert!(read.iter().all(|&b| b == byte), "chunk {chunk}");
    }
    layers.push(MemoryLayer {
        hashes: Some(hashes),
        ..MemoryLayer::new(file, index)
    });
    fill(&memory, 70, 99);
    fill(&memory, 71, 0);
    let second = save(&memory, &layers);
    assert_eq!(second.index.stored.iter().collect::<Vec<_>>(), [70]);
    assert_eq!(second.index.zero.iter().collect::<Vec<_>>(), [71]);
}

#[test]
fn indexes_of_two_writers_are_joined() {
    let memory = memory::allocate(128).unwrap();
    let linear = LinearMemory::new(&memory).unwrap();
    let (all, layers) = (UnitSet::full(linear.chunks()), MemoryLayers::default());
    let pages = all_pages(&linear);
    let file = TempFile::new().unwrap().into_file();
    let sets = (&all, &pages);
    let mut writers = [(); 2].map(|()| writer(&linear, &layers, sets, &file, &file));
    let [one, other] = &mut writers;
    one.index.stored.insert(3);
    other.index.stored.insert(linear.chunks() - 1);
    other.index.zero.insert(64);
    one.add_index_words(other.index_words());
    let stored: Vec<_> = one.index.stored.iter().collect();
    assert_eq!(stored, [3, linear.chunks() - 1]);
    assert_eq!(one.index.zero.iter().collect::<Vec<_>>(), [64]);
}

#[test]
fn a_full_disk_is_reported() {
    let memory = memory::allocate(128).unwrap();
    fill(&memory, 1, 1);
    let linear = LinearMemory::new(&memory).unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let all = UnitSet::full(linear.chunks());
    let (pages, layers) = (all_pages(&linear), MemoryLayers::default());
    let mut writer = writer(&linear, &layers, (&all, &pages), &full, &full);
    // The length of /dev/full cannot be changed either.
    assert!(writer.write().is_err());
}
