//! Reads the working set of a lineage into the page cache, in large pieces.
//!
//! The *working set* of a snapshot is the memory that a restored guest touches first. It is
//! recorded, and prefetched by later restores.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.

use crate::snapshot::read_index;
use crate::{Lineage, SnapshotError, SnapshotLayer};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, MEMORY_PAGE, UnitSet};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Size of a chunk in bytes.
const CHUNK: u64 = MEMORY_CHUNK as u64;
/// Number of pages of a chunk.
const CHUNK_PAGES: u64 = CHUNK / MEMORY_PAGE as u64;
/// Number of runs per layer that are checked in the page cache. A layer is read if one of them is
/// not cached.
const SAMPLED_RUNS: usize = 8;

/// Number of a layer in [`IndexedLayers`], and a range of its chunks that no newer layer overrides.
type LayerRun = (usize, Range<u64>);

/// Open memory layers with their indexes, oldest first.
struct IndexedLayers(Vec<(SnapshotLayer, LayerIndex)>);

impl IndexedLayers {
    /// Opens the memory layers of a lineage with their indexes.
    fn open(lineage: &Lineage) -> Result<Self, SnapshotError> {
        let layers = lineage
            .memory_snapshots()
            .iter()
            .zip(lineage.memory()?)
            .map(|(snapshot, layer)| {
                let index = read_index(&layer.index).map_err(SnapshotError::io(snapshot.path()))?;
                Ok((layer, index))
            });
        layers.collect::<Result<_, _>>().map(Self)
    }

    /// Returns the locations of the chunks of `set`, newest layer first.
    fn runs(&self, set: &UnitSet) -> Vec<LayerRun> {
        let mut remaining = set.clone();
        let mut runs: Vec<LayerRun> = Vec::new();
        // From newest to oldest: the newest layer that stores a chunk or marks it as zero
        // determines its content.
        for (number, (_, index)) in self.0.iter().enumerate().rev() {
            let decided: Vec<u64> = remaining
                .iter()
                .filter(|&chunk| index.decides(chunk))
                .collect();
            for chunk in decided {
                remaining.remove(chunk);
                // A zero chunk is not in the file.
                if !index.stored.contains(chunk) {
                    continue;
                }
                match runs.last_mut() {
                    Some((layer, run)) if *layer == number && run.end == chunk => run.end += 1,
                    _ => runs.push((number, chunk..chunk + 1)),
                }
            }
        }
        runs
    }

    /// Requests the kernel to read `runs`. Returns their size in bytes.
    fn request(&self, runs: &[LayerRun]) -> u64 {
        let mut bytes = 0;
        for (layer, run) in runs {
            let (offset, length) = (run.start * CHUNK, (run.end - run.start) * CHUNK);
            bytes += length;
            if let (Ok(offset), Ok(length)) = (offset.try_into(), length.try_into()) {
                let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
                // Ignore the error: the chunks are read when they are touched.
                let _ = posix_fadvise(&self.0[*layer].0.file, offset, length, advice);
            }
        }
        bytes
    }

    /// Returns which layers of `runs` are not in the page cache, according to samples.
    fn cold(&self, runs: &[LayerRun]) -> Vec<bool> {
        let cold = |(number, (layer, _)): (usize, &(SnapshotLayer, LayerIndex))| {
            let own: Vec<u64> = runs
                .iter()
                .filter(|(layer, _)| *layer == number)
                .map(|(_, run)| run.start)
                .collect();
            // Spread the samples over the layer.
            let step = own.len().div_ceil(SAMPLED_RUNS).max(1);
            let mut samples = own.into_iter().step_by(step);
            samples.any(|chunk| !is_cached(&layer.file, chunk * CHUNK))
        };
        self.0.iter().enumerate().map(cold).collect()
    }
}

/// Returns whether the page at `offset` is in the page cache. A non-blocking read is not suitable:
/// it starts to read the page, and a fast disk completes this in time.
fn is_cached(file: &File, offset: u64) -> bool {
    let Ok(offset) = offset.try_into() else {
        return false;
    };
    let length = MEMORY_PAGE as usize;
    let mut state = 0u8;
    // SAFETY: maps one page read-only, does not access it, and unmaps it again. mincore writes one
    // byte.
    unsafe {
        let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        let page = libc::mmap(
            std::ptr::null_mut(),
            length,
            protection,
            flags,
            file.as_raw_fd(),
            offset,
        );
        if page == libc::MAP_FAILED {
            return false;
        }
        let result = libc::mincore(page, length, &raw mut state);
        libc::munmap(page, length);
        // Bit 0 of each byte of the result: the page is in memory.
        result == 0 && state & 1 == 1
    }
}

/// Returns the chunks that contain `pages`.
fn chunks_of(pages: &UnitSet, chunks: u64) -> UnitSet {
    let mut set = UnitSet::empty(chunks);
    pages.iter().for_each(|page| set.insert(page / CHUNK_PAGES));
    set
}

impl Lineage {
    /// Requests the kernel to read the working set into the page cache, without waiting. Chunks
    /// with pages that a restored guest writes first are requested first, because a VMM copies
    /// these pages before the guest runs. Layers in the page cache are skipped. Returns the number
    /// of requested bytes.
    pub fn read_ahead(&self) -> Result<u64, SnapshotError> {
        let Some((set, _)) = self.working_set()? else {
            return Ok(0);
        };
        let layers = IndexedLayers::open(self)?;
        // For layers that are in the page cache, requests would only be useless system calls.
        let cold = layers.cold(&layers.runs(&set));
        if !cold.contains(&true) {
            return Ok(0);
        }
        let first = match self.written_page_set() {
            Ok(Some(pages)) => chunks_of(&pages, set.units()),
            _ => UnitSet::empty(set.units()),
        };
        let mut rest = set;
        first.iter().for_each(|chunk| rest.remove(chunk));
        let mut bytes = 0;
        for set in [first, rest] {
            let mut runs = layers.runs(&set);
            runs.retain(|(layer, _)| cold.get(*layer) == Some(&true));
            bytes += layers.request(&runs);
        }
        Ok(bytes)
    }

    /// Reads the working set, or all memory if no working set is recorded, into the page cache and
    /// marks it as recently used. Returns the number of bytes.
    pub fn prefetch(&self) -> Result<u64, SnapshotError> {
        let layers = IndexedLayers::open(self)?;
        let Some((_, newest)) = layers.0.last() else {
            return Ok(0);
        };
        let set = match self.working_set()? {
            Some((set, _)) => set,
            None => UnitSet::full(newest.units()),
        };
        let runs = layers.runs(&set);
        // Request all chunks first, so that the storage device can queue them.
        layers.request(&runs);
        // Reading marks the pages as recently used, which the request above does not.
        let mut buffer = vec![0; MEMORY_CHUNK as usize];
        let mut prefetched = 0;
        for (layer, run) in runs {
            let failed = |e: io::Error| match self.memory_snapshots().get(layer) {
                Some(snapshot) => SnapshotError::io(snapshot.path())(e),
                // Does not occur: each layer belongs to a snapshot.
                None => SnapshotError::Missing(String::new()),
            };
            for chunk in run {
                let read = layers.0[layer].0.file.read_at(&mut buffer, chunk * CHUNK);
                prefetched += read.map_err(failed)? as u64;
            }
        }
        Ok(prefetched)
    }
}
