//! Writes a memory layer: the chunks of guest memory that differ from the layers below. After its
//! creation, the writer allocates no memory, because it may run in a process forked from a
//! multi-threaded process, in which another thread may have locked the allocator.
//!
//! A *layer* is the part of a memory that one snapshot stores: the content that differs from its
//! ancestors. A *chunk* is 64 KiB of memory. A *candidate* is a chunk that may differ from the
//! layers below. A *run* is a series of bytes that are adjacent in memory and in the layer.

use super::chunk_hashes::{ChunkHashes, hash_chunk};
use super::layer_mappings::LayerMappings;
use super::layer_output::{LayerOutput, MAX_RUN_BYTES, write};
use super::linear_memory::{CHUNK_BYTES, CHUNK_SIZE, LinearMemory};
use super::memory_layers::{MemoryLayers, StoredContent};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, MEMORY_PAGE, UnitSet};
use nix::errno::Errno;
use std::fs::File;
use std::ops::Range;
use std::time::Instant;

/// Minimum number of pages that may differ for which direct I/O is used: 64 MiB. Later snapshots
/// and rollbacks read smaller layers again, so that these should be in the page cache.
pub const LARGE_LAYER_PAGES: u64 = 16_384;
/// Minimum number of candidates for which two processes are used.
const MIN_PARALLEL_CHUNKS: usize = 1024;

const PAGE_BYTES: usize = MEMORY_PAGE as usize;
const CHUNK_PAGES: u64 = MEMORY_CHUNK as u64 / MEMORY_PAGE as u64;

/// Input of a memory layer.
pub struct LayerSource<'a> {
    /// Guest memory, which must not change while the layer is written.
    pub linear: &'a LinearMemory,
    /// The layers below.
    pub layers: &'a MemoryLayers,
    /// Chunks that may differ from the layers.
    pub candidates: &'a UnitSet,
    /// Pages that may differ from the layers. All other pages of a candidate equal the layers.
    pub pages: &'a UnitSet,
    /// Receives the hashes of stored chunks. `None` if the next snapshot will not compare with
    /// them.
    pub hashes: Option<&'a ChunkHashes>,
}

/// Writer of one memory layer and its index.
pub struct LayerWriter<'a> {
    source: LayerSource<'a>,
    output: LayerOutput<'a>,
    index_file: &'a File,
    index: LayerIndex,
    encoded: Vec<u8>,
    mappings: LayerMappings,
    run: PendingRun,
    /// Chunk at which [`Self::write`] continues. All candidates below are written.
    next: u64,
}

/// Bytes that are not written yet. They are contiguous in memory and in the file.
struct PendingRun {
    host: *const u8,
    bytes: usize,
    offset: i64,
}

impl<'a> LayerWriter<'a> {
    /// Creates a writer. The files must be empty.
    pub fn new(source: LayerSource<'a>, output: LayerOutput<'a>, index_file: &'a File) -> Self {
        let linear = source.linear;
        Self {
            index: LayerIndex::empty(MEMORY_CHUNK, linear.bytes()),
            // Allocate all buffers here.
            encoded: vec![0; LayerIndex::encoded_len(linear.chunks())],
            mappings: LayerMappings::new(source.layers, linear.bytes()),
            run: PendingRun {
                host: std::ptr::null(),
                bytes: 0,
                offset: 0,
            },
            next: 0,
            source,
            output,
            index_file,
        }
    }

    /// Writes chunks until `deadline`. Returns whether the layer and its index are complete.
    /// Otherwise, [`Self::write`] continues, also in a forked process.
    pub fn write_until(&mut self, deadline: Instant) -> Result<bool, Errno> {
        self.set_len()?;
        let candidates = self.source.candidates;
        for chunk in candidates.iter() {
            if Instant::now() >= deadline {
                self.flush()?;
                return Ok(false);
            }
            self.chunk(chunk)?;
            self.next = chunk + 1;
        }
        self.flush()?;
        self.write_index()?;
        Ok(true)
    }

    /// Writes the rest of the layer, and its index.
    pub fn write(&mut self) -> Result<(), Errno> {
        self.set_len()?;
        self.write_range(0..self.source.linear.chunks())?;
        self.write_index()
    }

    /// Sets the length of the file to the size of memory.
    pub fn set_len(&self) -> Result<(), Errno> {
        self.output.set_len(self.source.linear.bytes())
    }

    /// Returns the middle of the remaining candidates. `None` if there are too few for two
    /// processes.
    pub fn middle_chunk(&self) -> Option<u64> {
        let remaining = || self.source.candidates.iter_range(self.next..u64::MAX);
        let count = remaining().count();
        (count >= MIN_PARALLEL_CHUNKS)
            .then(|| remaining().nth(count / 2))
            .flatten()
    }

    /// Copies long runs before writing them: see [`LayerOutput::enable_bounce_buffer`].
    pub fn enable_bounce_buffer(&mut self) {
        self.output.enable_bounce_buffer();
    }

    /// Writes the chunks of `range` that are not written yet.
    pub fn write_range(&mut self, range: Range<u64>) -> Result<(), Errno> {
        let candidates = self.source.candidates;
        let start = range.start.max(self.next);
        // `candidates` ascends, so runs can be joined.
        let in_range = candidates.iter().skip_while(|&chunk| chunk < start);
        for chunk in in_range.take_while(|&chunk| chunk < range.end) {
            self.chunk(chunk)?;
        }
        self.flush()
    }

    /// Compares one chunk with the layers below, and adds it to the new layer if it differs.
    /// Adjacent chunks are collected to a run, which is written at once.
    fn chunk(&mut self, chunk: u64) -> Result<(), Errno> {
        let host = self.source.linear.chunk(chunk).ok_or(Errno::EFAULT)?;
        // SAFETY: a chunk is CHUNK_BYTES of mapped guest memory, which does not change meanwhile
        // (see `LayerSource`).
        let content = unsafe { std::slice::from_raw_parts(host.cast_const(), CHUNK_BYTES) };
        let offset =
            i64::try_from(chunk * u64::from(MEMORY_CHUNK)).map_err(|_| Errno::EOVERFLOW)?;
        let stored_content = self.source.layers.stored_content(chunk);
        // A hash that the comparison has computed is used again below.
        let mut hashed = None;
        let is_unchanged = match stored_content {
            StoredContent::Zero => self
                .runs(chunk)
                .all(|run| content.get(run).is_some_and(is_zero)),
            StoredContent::Hash(stored) => *hashed.insert(hash_chunk(content)) == stored,
            StoredContent::File(layer) => self.equals(layer, chunk, content)?,
        };
        if is_unchanged {
            return Ok(());
        }
        // A chunk that became zero needs no space in the file.
        if !matches!(stored_content, StoredContent::Zero) && is_zero(content) {
            self.index.zero.insert(chunk);
            return Ok(());
        }
        self.index.stored.insert(chunk);
        if let Some(hashes) = self.source.hashes {
            hashes.set(chunk, hashed.unwrap_or_else(|| hash_chunk(content)));
        }
        // Join with the pending run if both the memory and the file continue it.
        let continues_run = !self.run.host.is_null()
            && self.run.host.wrapping_add(self.run.bytes) == host.cast_const()
            && i64::try_from(self.run.bytes).is_ok_and(|n| self.run.offset + n == offset)
            && !must_split_at(offset);
        if !continues_run {
            self.flush()?;
            self.run.host = host;
            self.run.offset = offset;
        }
        self.run.bytes += CHUNK_BYTES;
        Ok(())
    }

    /// Returns whether the pages of a chunk that may differ equal the pages of a layer's file.
    fn equals(&mut self, layer: usize, chunk: u64, content: &[u8]) -> Result<bool, Errno> {
        let runs = self.runs(chunk);
        let offset = usize::try_from(chunk * CHUNK_SIZE).map_err(|_| Errno::EOVERFLOW)?;
        let stored = self.mappings.chunk(self.source.layers, layer, offset)?;
        let mut pairs = runs.map(|run| (stored.get(run.clone()), content.get(run)));
        Ok(pairs.all(|(stored, content)| stored == content))
    }

    /// Returns the runs of pages of `chunk` that may differ, as bytes from the start of the chunk.
    fn runs(&self, chunk: u64) -> impl Iterator<Item = Range<usize>> + use<> {
        page_runs(pages_of(self.source.pages, chunk))
    }

    /// Writes the current run, which is a series of adjacent chunks in memory, with one call.
    fn flush(&mut self) -> Result<(), Errno> {
        let bytes = std::mem::take(&mut self.run.bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the run consists of whole, contiguous chunks of guest memory in one mapping.
        let data = unsafe { std::slice::from_raw_parts(self.run.host, bytes) };
        // The next chunk starts a new run. If the write fails, this run is lost, but then the whole
        // layer fails.
        self.run.host = std::ptr::null();
        self.output.write(data, self.run.offset)
    }

    /// Returns the words of this writer's index: bits of stored chunks, then bits of zero chunks.
    pub fn index_words(&self) -> impl Iterator<Item = u64> {
        let (stored, zero) = (&self.index.stored, &self.index.zero);
        stored.words().iter().chain(zero.words()).copied()
    }

    /// Merges the index of another writer of the same memory.
    pub fn add_index_words(&mut self, words: impl Iterator<Item = u64>) {
        let count = self.index.stored.words().len();
        for (at, word) in (0..).zip(words) {
            let (set, at) = match usize::checked_sub(at, count) {
                None => (&mut self.index.stored, at),
                Some(at) => (&mut self.index.zero, at),
            };
            set.insert_word(at, word);
        }
    }

    /// Writes the index.
    pub fn write_index(&mut self) -> Result<(), Errno> {
        let header = LayerIndex::header(MEMORY_CHUNK, self.source.linear.chunks());
        let (stored, zero) = (&self.index.stored, &self.index.zero);
        let (head, maps) = self
            .encoded
            .split_at_mut_checked(header.len())
            .ok_or(Errno::EOVERFLOW)?;
        head.copy_from_slice(&header);
        let words = stored.words().iter().chain(zero.words());
        for (to, word) in maps.as_chunks_mut().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        write(self.index_file, &self.encoded, 0)
    }

    /// Returns the index of the written chunks.
    pub fn index(self) -> LayerIndex {
        self.index
    }
}

/// Returns whether a run must end at `offset` of the file. Runs end at multiples of
/// [`MAX_RUN_BYTES`], the maximum length of a write. The page cache then contains whole huge pages.
fn must_split_at(offset: i64) -> bool {
    usize::try_from(offset).is_ok_and(|offset| offset.is_multiple_of(MAX_RUN_BYTES))
}

/// Returns the pages of `chunk` that are in `pages`. Bit `n` is page `n` of the chunk.
fn pages_of(pages: &UnitSet, chunk: u64) -> u64 {
    let first = chunk * CHUNK_PAGES;
    let word = usize::try_from(first / 64).ok();
    let word = word.and_then(|at| pages.words().get(at)).unwrap_or(&0);
    // The pages of a chunk are in one word, because 64 is a multiple of `CHUNK_PAGES`.
    word >> (first % 64) & ((1 << CHUNK_PAGES) - 1)
}

/// Returns the runs of pages whose bits are set in `rest`, as bytes. Does not allocate memory.
fn page_runs(mut rest: u64) -> impl Iterator<Item = Range<usize>> {
    std::iter::from_fn(move || {
        (rest != 0).then(|| {
            let start = rest.trailing_zeros();
            let pages = (rest >> start).trailing_ones();
            rest &= !(u64::MAX >> (64 - pages) << start);
            let [start, end] = [start, start + pages].map(|page| page as usize * PAGE_BYTES);
            start..end
        })
    })
}

/// Returns whether all bytes are zero.
fn is_zero(bytes: &[u8]) -> bool {
    // Compare 16 bytes at a time. The call of `Iterator::fold` has no branches, so that the
    // compiler can vectorise it.
    //
    // SAFETY: any bytes are a valid u128.
    let (head, words, tail) = unsafe { bytes.align_to::<u128>() };
    head.iter().chain(tail).all(|&b| b == 0)
        && words
            .chunks(64)
            .all(|part| part.iter().fold(0, |or, &word| or | word) == 0)
}

#[cfg(test)]
mod tests;
