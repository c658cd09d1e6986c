//! Maps the layers of a snapshot into new guest memory, or reads them. [`plan_mappings`] decides
//! how each chunk is restored, and [`map_layers`] executes the plan.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *chunk* is 64 KiB of memory.

use super::failed;
use super::linear_memory::{CHUNK_SIZE, LinearMemory};
use super::memory_layers::MemoryLayers;
use crate::error::VmmError;
use jiffy_proto::layer::UnitSet;
use nix::errno::Errno;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Maximum number of mappings of a restored memory. The kernel limits a process to 65,530
/// (`vm.max_map_count`), and a lookup takes longer the more mappings exist.
pub const MAX_MAPPINGS: usize = 16_384;

/// Runs of chunks to map, to read, and to fetch later.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MappingPlan {
    /// Runs to map from a layer: layer number and chunks.
    pub map: Vec<(usize, Range<u64>)>,
    /// Runs to read into memory at once.
    pub copy: Vec<(usize, Range<u64>)>,
    /// Runs to fetch when a page of them is accessed.
    pub later: Vec<(usize, Range<u64>)>,
    /// Runs in which accesses to missing pages wait. They cover `later`. If there would be too many
    /// runs, they also cover the chunks between them.
    pub registered: Vec<Range<u64>>,
}

/// Decides which runs are mapped and which are read. Chunks in `eager` are read. The smallest other
/// runs are also read, as far as necessary to stay within `budget` mappings.
pub fn plan_mappings(
    runs: Vec<(usize, Range<u64>)>,
    eager: Option<&UnitSet>,
    budget: usize,
) -> MappingPlan {
    plan_lazy_mappings(runs, eager, |_, _| false, budget)
}

/// Same as [`plan_mappings`], for layers from which chunks are missing: `absent` returns whether a
/// layer (first argument) lacks a chunk. Missing chunks are fetched later.
pub fn plan_lazy_mappings(
    runs: Vec<(usize, Range<u64>)>,
    eager: Option<&UnitSet>,
    absent: impl Fn(usize, u64) -> bool,
    budget: usize,
) -> MappingPlan {
    let mut plan = MappingPlan::default();
    for (layer, run) in runs {
        let method = |chunk| match eager {
            _ if absent(layer, chunk) => RestoreMethod::Fetch,
            Some(eager) if eager.contains(chunk) => RestoreMethod::Read,
            _ => RestoreMethod::Map,
        };
        // Split the run into parts that are restored with the same method.
        let mut rest = run;
        while !rest.is_empty() {
            let first = method(rest.start);
            let end = (rest.start..rest.end)
                .find(|&chunk| method(chunk) != first)
                .unwrap_or(rest.end);
            let list = match first {
                RestoreMethod::Map => &mut plan.map,
                RestoreMethod::Read => &mut plan.copy,
                RestoreMethod::Fetch => &mut plan.later,
            };
            list.push((layer, rest.start..end));
            rest.start = end;
        }
    }
    plan.registered = join_runs(&plan.later);
    // Each mapping may leave an anonymous mapping after it.
    let max_runs = budget / 2;
    if plan.map.len() + plan.registered.len() > max_runs {
        // Long runs save the most reading, so they remain mapped.
        let size = |run: &(usize, Range<u64>)| run.1.end - run.1.start;
        plan.map.sort_by_key(|run| std::cmp::Reverse(size(run)));
        let mapped_count = max_runs.saturating_sub(plan.registered.len());
        let mapped_count = mapped_count.min(plan.map.len());
        plan.copy.extend(plan.map.drain(mapped_count..));
        plan.map.sort_by_key(|run| run.1.start);
        plan.copy.sort_by_key(|run| run.1.start);
    }
    // Fetching too much only costs time, but too many registrations would exceed the kernel's
    // limit.
    if plan.registered.len() > max_runs {
        plan.close_gaps(max_runs);
    }
    plan
}

/// Method of restoring a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RestoreMethod {
    Map,
    Read,
    Fetch,
}

/// Returns the chunks of `runs`, which must ascend, in as few ranges as possible.
fn join_runs(runs: &[(usize, Range<u64>)]) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for (_, run) in runs {
        match ranges.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => ranges.push(run.clone()),
        }
    }
    ranges
}

impl MappingPlan {
    /// Registers the smallest gaps between registered runs as well, until at most `max_runs` runs
    /// remain. Chunks of a layer in such a gap are also fetched later.
    fn close_gaps(&mut self, max_runs: usize) {
        // Gap `at` is between the registered runs `at - 1` and `at`.
        let mut gaps: Vec<usize> = (1..self.registered.len()).collect();
        gaps.sort_by_key(|&at| self.registered[at].start - self.registered[at - 1].end);
        gaps.truncate(self.registered.len() - max_runs.max(1));
        gaps.sort_unstable();
        let mut gaps = gaps.into_iter().peekable();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (at, range) in std::mem::take(&mut self.registered).into_iter().enumerate() {
            match ranges.last_mut() {
                Some(last) if gaps.next_if_eq(&at).is_some() => last.end = range.end,
                _ => ranges.push(range),
            }
        }
        // Each run of `map` and `copy` is completely inside one closed gap or outside all of
        // `ranges`.
        let inside = |run: &(usize, Range<u64>)| {
            let after = ranges.partition_point(|range| range.start <= run.1.start);
            let before = after.checked_sub(1).and_then(|at| ranges.get(at));
            before.is_some_and(|range| run.1.start < range.end)
        };
        self.later
            .extend(self.map.extract_if(.., |run| inside(run)));
        self.later
            .extend(self.copy.extract_if(.., |run| inside(run)));
        self.later.sort_by_key(|run| run.1.start);
        self.registered = ranges;
    }
}

/// Part of a layer, and its destination in guest memory. The destination must be private and
/// unused.
#[derive(Debug)]
pub struct ChunkExtent {
    layer: usize,
    offset: u64,
    bytes: u64,
    host: *mut u8,
}

/// Source of restored memory. Each part is mapped, read, or fetched later.
pub trait ChunkSource {
    /// Maps the part, so that its pages are read on first access. Returns `false` if the source
    /// cannot map the part: the caller must then read it.
    fn map(&self, piece: &ChunkExtent) -> Result<bool, Errno>;

    /// Reads the whole part.
    fn read(&self, piece: &ChunkExtent) -> Result<(), Errno>;

    /// Makes accesses to `bytes` bytes at `host` wait until their content is available. The memory
    /// must be untouched.
    fn defer(&self, _host: *mut u8, _bytes: u64) -> Result<(), Errno> {
        Err(Errno::ENOTSUP)
    }
}

impl ChunkSource for MemoryLayers {
    fn map(&self, piece: &ChunkExtent) -> Result<bool, Errno> {
        let file = self.file(piece.layer).ok_or(Errno::ENOENT)?;
        map(file, piece.offset, piece.bytes, piece.host).map(|()| true)
    }

    fn read(&self, piece: &ChunkExtent) -> Result<(), Errno> {
        let file = self.file(piece.layer).ok_or(Errno::ENOENT)?;
        read(file, piece.offset, piece.bytes, piece.host)
    }
}

/// Executes a plan on untouched memory.
pub fn map_layers(
    plan: &MappingPlan,
    source: &impl ChunkSource,
    linear: &LinearMemory,
) -> Result<(), VmmError> {
    let extents = |layer: usize, run: &Range<u64>| {
        let extents = linear.extents(run.clone());
        extents.map(move |(first, chunks, host)| ChunkExtent {
            layer,
            offset: first * CHUNK_SIZE,
            bytes: chunks * CHUNK_SIZE,
            host,
        })
    };
    let (mapping, reading) = ("mapping a memory layer", "reading a memory layer");
    let mut unmapped = Vec::new();
    for (layer, run) in &plan.map {
        for piece in extents(*layer, run) {
            if !source.map(&piece).map_err(failed(mapping))? {
                unmapped.push(piece);
            }
        }
    }
    for run in &plan.registered {
        for (_, chunks, host) in linear.extents(run.clone()) {
            let deferred = source.defer(host, chunks * CHUNK_SIZE);
            deferred.map_err(failed("registering missing memory"))?;
        }
    }
    // The reads follow all mappings and registrations. Reading creates huge pages, which would
    // extend into memory that is not registered yet, and make that memory zero.
    for piece in unmapped {
        source.read(&piece).map_err(failed(reading))?;
    }
    for (layer, run) in &plan.copy {
        for piece in extents(*layer, run) {
            source.read(&piece).map_err(failed(reading))?;
        }
    }
    Ok(())
}

/// Maps a part of a layer's file over guest memory at the address `host`.
fn map(file: &File, offset: u64, bytes: u64, host: *mut u8) -> Result<(), Errno> {
    let length = usize::try_from(bytes).map_err(|_| Errno::EOVERFLOW)?;
    let offset = i64::try_from(offset).map_err(|_| Errno::EOVERFLOW)?;
    // SAFETY: the range is inside guest memory, which is private and not in use yet, and stays
    // private and writable. The file is long enough and is never shortened, because it belongs to
    // an immutable snapshot.
    let at = unsafe {
        // The mapping is private: the guest's writes do not reach the file.
        libc::mmap(
            host.cast(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            offset,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    Ok(())
}

/// Reads `bytes` bytes of a layer to `host`, which must be unused guest memory.
pub(super) fn read(file: &File, offset: u64, bytes: u64, host: *mut u8) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes {
        let length = usize::try_from(bytes - done).map_err(|_| Errno::EOVERFLOW)?;
        let at = i64::try_from(offset + done).map_err(|_| Errno::EOVERFLOW)?;
        let skip = usize::try_from(done).map_err(|_| Errno::EOVERFLOW)?;
        // SAFETY: `skip + length` bytes at `host` are inside guest memory, which is not in use yet.
        let count = unsafe { libc::pread(file.as_raw_fd(), host.add(skip).cast(), length, at) };
        match u64::try_from(count) {
            // The file is shorter than its index requires.
            Ok(0) => return Err(Errno::ENODATA),
            Ok(count) => done += count,
            Err(_) if Errno::last() == Errno::EINTR => {}
            Err(_) => return Err(Errno::last()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::memory_layers::MemoryLayer;
    use super::*;
    use crate::memory;
    use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
    use std::os::unix::fs::FileExt;
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::tempfile::TempFile;

    #[test]
    fn fragmented_layers_do_not_exceed_the_mapping_budget() {
        // Every other chunk of 64 GiB, and a few long runs.
        let mut runs: Vec<(usize, Range<u64>)> =
            (0..500_000u64).map(|n| (0, n * 2..n * 2 + 1)).collect();
        runs.extend((0..10).map(|n| (1, 1_000_000 + n * 100..1_000_050 + n * 100)));
        let total: u64 = runs.iter().map(|(_, r)| r.end - r.start).sum();
        let plan = plan_mappings(runs, None, MAX_MAPPINGS);
        assert_eq!(plan.map.len() * 2, MAX_MAPPINGS);
        assert_eq!(plan.map.iter().filter(|(layer, _)| *layer == 1).count(), 10);
        let all = plan.map.iter().chain(&plan.copy);
        assert_eq!(all.map(|(_, r)| r.end - r.start).sum::<u64>(), total);
    }

    #[test]
    fn the_working_set_is_read_and_the_rest_mapped() {
        let mut eager = UnitSet::empty(100);
        eager.insert_range(10..20);
        eager.insert(50);
        let plan = plan_mappings(vec![(0, 5..15), (1, 40..60)], Some(&eager), MAX_MAPPINGS);
        assert_eq!(plan.map, [(0, 5..10), (1, 40..50), (1, 51..60)]);
        assert_eq!(plan.copy, [(0, 10..15), (1, 50..51)]);
    }

    #[test]
    fn absent_chunks_are_fetched_later_and_their_runs_do_not_exceed_the_budget() {
        let mut eager = UnitSet::empty(100);
        eager.insert_range(10..20);
        let absent = |layer, chunk| layer == 0 && chunk % 16 < 8;
        let runs = vec![(0, 0..30), (1, 30..60)];
        let plan = plan_lazy_mappings(runs.clone(), Some(&eager), absent, MAX_MAPPINGS);
        assert_eq!(plan.later, [(0, 0..8), (0, 16..24)]);
        assert_eq!(plan.registered, [0..8, 16..24]);
        assert_eq!(plan.copy, [(0, 10..16)]);
        assert_eq!(plan.map, [(0, 8..10), (0, 24..30), (1, 30..60)]);

        let plan = plan_lazy_mappings(runs, Some(&eager), absent, 2);
        assert!(plan.registered.iter().eq([&(0..24)]));
        let later = [(0, 0..8), (0, 8..10), (0, 10..16), (0, 16..24)];
        assert_eq!(plan.later, later);
        assert_eq!(plan.copy, [(0, 24..30), (1, 30..60)]);

        let every_other = |_, chunk| chunk % 2 == 0;
        let plan = plan_lazy_mappings(vec![(0, 0..500_000)], None, every_other, MAX_MAPPINGS);
        assert!(plan.registered.len() + plan.map.len() <= MAX_MAPPINGS / 2);
        let all = plan.map.iter().chain(&plan.copy).chain(&plan.later);
        assert_eq!(all.map(|(_, r)| r.end - r.start).sum::<u64>(), 500_000);
    }

    /// Layers that cannot be mapped.
    struct UnmappableLayers(MemoryLayers);

    impl ChunkSource for UnmappableLayers {
        fn map(&self, _: &ChunkExtent) -> Result<bool, Errno> {
            Ok(false)
        }

        fn read(&self, piece: &ChunkExtent) -> Result<(), Errno> {
            self.0.read(piece)
        }
    }

    #[test]
    fn an_extent_that_cannot_be_mapped_is_read() {
        let bytes = 128u64 << 20;
        let file = TempFile::new().unwrap().into_file();
        file.set_len(bytes).unwrap();
        file.write_all_at(&[7; 65536], 3 * CHUNK_SIZE).unwrap();
        let mut index = LayerIndex::empty(MEMORY_CHUNK, bytes);
        index.stored.insert(3);
        let layers = MemoryLayers::new(vec![MemoryLayer::new(file, index)], bytes).unwrap();
        let memory = memory::allocate(128).unwrap();
        let linear = LinearMemory::new(&memory).unwrap();
        let plan = plan_mappings(layers.runs(linear.chunks()), None, MAX_MAPPINGS);
        assert!(plan.copy.is_empty());
        map_layers(&plan, &UnmappableLayers(layers), &linear).unwrap();
        let at = |chunk| {
            memory
                .read_obj::<u8>(GuestAddress(chunk * CHUNK_SIZE))
                .unwrap()
        };
        assert_eq!([3, 4].map(at), [7, 0]);
    }

    #[test]
    fn mapped_and_read_memory_hold_the_content_of_the_newest_layers() {
        let bytes = 128u64 << 20;
        let layer = |stored: &[u64], zero: &[u64], fill: u8| {
            let file = TempFile::new().unwrap().into_file();
            file.set_len(bytes).unwrap();
            let mut index = LayerIndex::empty(MEMORY_CHUNK, bytes);
            for &chunk in stored {
                index.stored.insert(chunk);
                file.write_all_at(&[fill; 65536], chunk * CHUNK_SIZE)
                    .unwrap();
            }
            zero.iter().for_each(|&c| index.zero.insert(c));
            MemoryLayer::new(file, index)
        };
        let layers = vec![layer(&[0, 1, 2, 9], &[], 1), layer(&[1], &[2], 2)];
        let layers = MemoryLayers::new(layers, bytes).unwrap();
        let mut eager = UnitSet::empty(bytes / CHUNK_SIZE);
        eager.insert(9);
        for eager in [None, Some(&eager)] {
            let memory = memory::allocate(128).unwrap();
            let linear = LinearMemory::new(&memory).unwrap();
            let plan = plan_mappings(layers.runs(linear.chunks()), eager, MAX_MAPPINGS);
            map_layers(&plan, &layers, &linear).unwrap();
            for (chunk, expected) in [(0, 1u8), (1, 2), (2, 0), (3, 0), (9, 1)] {
                let at = GuestAddress(chunk * CHUNK_SIZE + 65535);
                assert_eq!(memory.read_obj::<u8>(at).unwrap(), expected);
                memory.write_obj(0xffu8, at).unwrap();
            }
        }
        let mut byte = [0];
        layers
            .file(0)
            .unwrap()
            .read_exact_at(&mut byte, 65535)
            .unwrap();
        assert_eq!(byte, [1], "a private write reached the layer");
    }
}
