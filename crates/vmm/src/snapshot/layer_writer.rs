//! Writes a memory layer: the chunks of guest memory that differ from the layers below. After its
//! creation, the writer allocates no memory, because it may run in a process forked from a
//! multi-threaded process, in which another thread may have locked the allocator.

use super::chunk_hashes::{ChunkHashes, hash_chunk};
use super::layer_output::{LayerOutput, MAX_RUN_BYTES, write};
use super::linear_memory::{CHUNK_BYTES, LinearMemory};
use super::memory_layers::{MemoryLayers, StoredContent};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, MEMORY_PAGE, UnitSet};
use nix::errno::Errno;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Minimum number of candidates for which two processes and direct I/O are used: 64 MiB.
pub const LARGE_LAYER_CHUNKS: u64 = 1024;

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
    stored_content: Vec<u8>,
    run: PendingRun,
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
            stored_content: vec![0; CHUNK_BYTES],
            run: PendingRun {
                host: std::ptr::null(),
                bytes: 0,
                offset: 0,
            },
            source,
            output,
            index_file,
        }
    }

    /// Writes the layer and its index.
    pub fn write(&mut self) -> Result<(), Errno> {
        self.set_len()?;
        self.write_range(0..self.source.linear.chunks())?;
        self.write_index()
    }

    /// Sets the length of the file to the size of memory.
    pub fn set_len(&self) -> Result<(), Errno> {
        self.output.set_len(self.source.linear.bytes())
    }

    /// Returns the middle of the candidates. `None` if there are too few for two processes.
    pub fn middle_chunk(&self) -> Option<u64> {
        let count = self.source.candidates.count();
        let half = usize::try_from(count / 2).ok()?;
        let middle_chunk =
            (count >= LARGE_LAYER_CHUNKS).then(|| self.source.candidates.iter().nth(half));
        middle_chunk.flatten()
    }

    /// Copies long runs before writing them: see [`LayerOutput::enable_bounce_buffer`].
    pub fn enable_bounce_buffer(&mut self) {
        self.output.enable_bounce_buffer();
    }

    /// Writes the chunks of `range`.
    pub fn write_range(&mut self, range: Range<u64>) -> Result<(), Errno> {
        let candidates = self.source.candidates;
        // `candidates` ascends, so runs can be joined.
        let in_range = candidates.iter().skip_while(|&chunk| chunk < range.start);
        for chunk in in_range.take_while(|&chunk| chunk < range.end) {
            self.chunk(chunk)?;
        }
        self.flush()
    }

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
            StoredContent::File(file) => self.equals(file, chunk, content, offset)?,
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

    /// Returns whether the pages of a chunk that may differ equal those of `file`. The chunk is at
    /// `offset` of the file.
    fn equals(
        &mut self,
        file: &File,
        chunk: u64,
        content: &[u8],
        offset: i64,
    ) -> Result<bool, Errno> {
        for run in self.runs(chunk) {
            let start = i64::try_from(run.start).map_err(|_| Errno::EOVERFLOW)?;
            let (Some(stored), Some(content)) =
                (self.stored_content.get_mut(run.clone()), content.get(run))
            else {
                return Err(Errno::EFAULT);
            };
            read(file, stored, offset + start)?;
            if stored != content {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the runs of pages of `chunk` that may differ, as bytes from the start of the chunk.
    fn runs(&self, chunk: u64) -> impl Iterator<Item = Range<usize>> + use<> {
        page_runs(pages_of(self.source.pages, chunk))
    }

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

fn is_zero(bytes: &[u8]) -> bool {
    // Compare 16 bytes at a time. The fold has no branches, so that the compiler can vectorise it.
    //
    // SAFETY: any bytes are a valid u128.
    let (head, words, tail) = unsafe { bytes.align_to::<u128>() };
    head.iter().chain(tail).all(|&b| b == 0)
        && words
            .chunks(64)
            .all(|part| part.iter().fold(0, |or, &word| or | word) == 0)
}

fn read(file: &File, mut to: &mut [u8], mut offset: i64) -> Result<(), Errno> {
    while !to.is_empty() {
        // SAFETY: `to` is a buffer of this length.
        let count =
            unsafe { libc::pread(file.as_raw_fd(), to.as_mut_ptr().cast(), to.len(), offset) };
        let count = match usize::try_from(count) {
            Ok(0) => return Err(Errno::ENODATA),
            Ok(count) => count,
            Err(_) if Errno::last() == Errno::EINTR => continue,
            Err(_) => return Err(Errno::last()),
        };
        to = to.get_mut(count..).ok_or(Errno::EIO)?;
        offset += i64::try_from(count).map_err(|_| Errno::EOVERFLOW)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::linear_memory::CHUNK_SIZE;
    use super::super::map_layers::{MAX_MAPPINGS, map_layers, plan_mappings};
    use super::super::memory_layers::MemoryLayer;
    use super::*;
    use crate::GuestMemory;
    use crate::memory;
    use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::tempfile::TempFile;

    fn fill(memory: &GuestMemory, chunk: u64, byte: u8) {
        let at = GuestAddress(chunk * CHUNK_SIZE);
        memory.write_slice(&[byte; CHUNK_BYTES], at).unwrap();
    }

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

    fn all_pages(linear: &LinearMemory) -> UnitSet {
        UnitSet::full(linear.bytes() / u64::from(MEMORY_PAGE))
    }

    fn save(memory: &GuestMemory, layers: &MemoryLayers) -> MemoryLayer {
        let linear = LinearMemory::new(memory).unwrap();
        save_pages(memory, layers, &all_pages(&linear))
    }

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
        // Pages that are equal, in each position of the differing page.
        for (chunk, page) in [(1, 0), (2, 15), (3, 7)] {
            write(chunk, page);
            (0..CHUNK_PAGES).for_each(|equal| may_differ(chunk, equal));
        }
        may_differ(4, 2);
        may_differ(4, 3);
        // Chunk 9 is zero in the layer.
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
        // Two parts, as written by two forked processes.
        writer.enable_bounce_buffer();
        writer.set_len().unwrap();
        writer.write_range(100..u64::MAX).unwrap();
        writer.write_range(0..100).unwrap();
        let index = writer.index();
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
}
