//! Writes the chunks that differ from the layers below. Allocates nothing once made, because it may run in a process forked
//! from one with threads.

use super::layers::{Below, Layers};
use super::linear::{CHUNK_BYTES, Linear};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, UnitSet};
use nix::errno::Errno;
use std::fs::File;
use std::os::fd::AsRawFd;

/// Most bytes written by one call.
const MAX_RUN: usize = 4 << 20;

/// Everything needed to write a memory layer.
pub struct Writer<'a> {
    linear: &'a Linear,
    layers: &'a Layers,
    candidates: &'a UnitSet,
    file: &'a File,
    index_file: &'a File,
    index: LayerIndex,
    encoded: Vec<u8>,
    below: Vec<u8>,
    run: Run,
}

/// Bytes that lie side by side in memory and in the file, not yet written.
struct Run {
    host: *const u8,
    bytes: usize,
    offset: i64,
}

impl<'a> Writer<'a> {
    /// Of the `candidates` among the chunks; `file` and `index_file` are empty.
    pub fn new(
        linear: &'a Linear,
        layers: &'a Layers,
        candidates: &'a UnitSet,
        file: &'a File,
        index_file: &'a File,
    ) -> Self {
        Self {
            linear,
            layers,
            candidates,
            file,
            index_file,
            index: LayerIndex::empty(MEMORY_CHUNK, linear.bytes()),
            encoded: vec![0; LayerIndex::encoded_len(linear.chunks())],
            below: vec![0; CHUNK_BYTES],
            run: Run {
                host: std::ptr::null(),
                bytes: 0,
                offset: 0,
            },
        }
    }

    /// Writes layer and index. Nobody may write to guest memory meanwhile.
    pub fn write(&mut self) -> Result<(), Errno> {
        let size = i64::try_from(self.linear.bytes()).map_err(|_| Errno::EOVERFLOW)?;
        // SAFETY: a call on an open descriptor that touches no memory of ours.
        if unsafe { libc::ftruncate(self.file.as_raw_fd(), size) } != 0 {
            return Err(Errno::last());
        }
        let candidates = self.candidates;
        for chunk in candidates.iter() {
            self.chunk(chunk)?;
        }
        self.flush()?;
        self.write_index()
    }

    fn chunk(&mut self, chunk: u64) -> Result<(), Errno> {
        let host = self.linear.chunk(chunk).ok_or(Errno::EFAULT)?;
        // SAFETY: a chunk is CHUNK_BYTES of mapped guest memory, to which nobody writes now (see `write`).
        let now = unsafe { std::slice::from_raw_parts(host.cast_const(), CHUNK_BYTES) };
        let offset =
            i64::try_from(chunk * u64::from(MEMORY_CHUNK)).map_err(|_| Errno::EOVERFLOW)?;
        match self.layers.below(chunk) {
            Below::Zero if is_zero(now) => return Ok(()),
            Below::Zero => {}
            Below::File(file) => {
                read(file, &mut self.below, offset)?;
                if self.below == now {
                    return Ok(());
                }
                if is_zero(now) {
                    self.index.zero.insert(chunk);
                    return Ok(());
                }
            }
        }
        self.index.stored.insert(chunk);
        let joined = !self.run.host.is_null()
            && self.run.host.wrapping_add(self.run.bytes) == host.cast_const()
            && i64::try_from(self.run.bytes).is_ok_and(|n| self.run.offset + n == offset)
            && self.run.bytes < MAX_RUN;
        if !joined {
            self.flush()?;
            self.run.host = host;
            self.run.offset = offset;
        }
        self.run.bytes += CHUNK_BYTES;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Errno> {
        let bytes = std::mem::take(&mut self.run.bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the run consists of whole chunks of guest memory, side by side in one mapping.
        let data = unsafe { std::slice::from_raw_parts(self.run.host, bytes) };
        self.run.host = std::ptr::null();
        write(self.file, data, self.run.offset)
    }

    fn write_index(&mut self) -> Result<(), Errno> {
        let header = LayerIndex::header(MEMORY_CHUNK, self.linear.chunks());
        let words = self
            .index
            .stored
            .words()
            .iter()
            .chain(self.index.zero.words());
        let (head, maps) = self
            .encoded
            .split_at_mut_checked(header.len())
            .ok_or(Errno::EOVERFLOW)?;
        head.copy_from_slice(&header);
        for (to, word) in maps.as_chunks_mut().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        write(self.index_file, &self.encoded, 0)
    }

    /// What was written.
    pub fn index(self) -> LayerIndex {
        self.index
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    // SAFETY: any bytes are valid u128.
    let (head, words, tail) = unsafe { bytes.align_to::<u128>() };
    head.iter().chain(tail).all(|&b| b == 0)
        && words
            .chunks(64)
            .all(|part| part.iter().fold(0, |or, &word| or | word) == 0)
}

fn read(file: &File, mut to: &mut [u8], mut offset: i64) -> Result<(), Errno> {
    while !to.is_empty() {
        // SAFETY: `to` is a buffer of this length.
        let got =
            unsafe { libc::pread(file.as_raw_fd(), to.as_mut_ptr().cast(), to.len(), offset) };
        let got = match usize::try_from(got) {
            Ok(0) => return Err(Errno::ENODATA),
            Ok(got) => got,
            Err(_) if Errno::last() == Errno::EINTR => continue,
            Err(_) => return Err(Errno::last()),
        };
        to = to.get_mut(got..).ok_or(Errno::EIO)?;
        offset += i64::try_from(got).map_err(|_| Errno::EOVERFLOW)?;
    }
    Ok(())
}

fn write(file: &File, mut from: &[u8], mut offset: i64) -> Result<(), Errno> {
    while !from.is_empty() {
        // SAFETY: `from` is readable memory of this length.
        let put =
            unsafe { libc::pwrite(file.as_raw_fd(), from.as_ptr().cast(), from.len(), offset) };
        let put = match usize::try_from(put) {
            Ok(0) => return Err(Errno::EIO),
            Ok(put) => put,
            Err(_) if Errno::last() == Errno::EINTR => continue,
            Err(_) => return Err(Errno::last()),
        };
        from = from.get(put..).ok_or(Errno::EIO)?;
        offset += i64::try_from(put).map_err(|_| Errno::EOVERFLOW)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::layers::Layer;
    use super::super::linear::CHUNK;
    use super::super::place::{MAX_MAPPINGS, place, plan};
    use super::*;
    use crate::GuestMemory;
    use crate::memory;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::tempfile::TempFile;

    fn fill(memory: &GuestMemory, chunk: u64, byte: u8) {
        let at = GuestAddress(chunk * CHUNK);
        memory.write_slice(&[byte; CHUNK_BYTES], at).unwrap();
    }

    fn save(memory: &GuestMemory, layers: &Layers) -> Layer {
        let linear = Linear::new(memory).unwrap();
        let (file, index) = (TempFile::new().unwrap(), TempFile::new().unwrap());
        let all = UnitSet::full(linear.chunks());
        let (file, index_file) = (file.into_file(), index.into_file());
        let mut writer = Writer::new(&linear, layers, &all, &file, &index_file);
        writer.write().unwrap();
        let index = writer.index();
        let mut written = vec![0; LayerIndex::encoded_len(linear.chunks())];
        index_file.read_exact_at(&mut written, 0).unwrap();
        assert_eq!(
            LayerIndex::decode(&written, MEMORY_CHUNK, linear.bytes()).unwrap(),
            index
        );
        Layer { file, index }
    }

    #[test]
    fn only_what_changed_is_stored_and_zeroes_cost_nothing() {
        let memory = memory::allocate(128).unwrap();
        for chunk in [3, 4, 700] {
            fill(&memory, chunk, 7);
        }
        fill(&memory, 5, 0);
        let first = save(&memory, &Layers::default());
        assert_eq!(first.index.stored.iter().collect::<Vec<_>>(), [3, 4, 700]);
        assert_eq!(first.index.zero.count(), 0);
        assert_eq!(first.file.metadata().unwrap().blocks() * 512, 3 * CHUNK);

        let bytes = 128 << 20;
        let mut layers = Layers::new(vec![first], bytes).unwrap();
        fill(&memory, 3, 7);
        fill(&memory, 4, 0);
        memory
            .write_obj(1u8, GuestAddress(900 * CHUNK + 77))
            .unwrap();
        let second = save(&memory, &layers);
        assert_eq!(second.index.stored.iter().collect::<Vec<_>>(), [900]);
        assert_eq!(second.index.zero.iter().collect::<Vec<_>>(), [4]);

        layers.push(second);
        let restored = memory::allocate(128).unwrap();
        let linear = Linear::new(&restored).unwrap();
        let plan = plan(layers.runs(linear.chunks()), None, MAX_MAPPINGS);
        place(&plan, &layers, &linear).unwrap();
        let at = |chunk| {
            restored
                .read_obj::<u8>(GuestAddress(chunk * CHUNK + 77))
                .unwrap()
        };
        assert_eq!([3, 4, 700, 900].map(at), [7, 0, 7, 1]);
    }

    #[test]
    fn a_full_disk_is_reported() {
        let memory = memory::allocate(128).unwrap();
        fill(&memory, 1, 1);
        let linear = Linear::new(&memory).unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        let all = UnitSet::full(linear.chunks());
        let layers = Layers::default();
        let mut writer = Writer::new(&linear, &layers, &all, &full, &full);
        // /dev/full cannot be made longer either.
        assert!(writer.write().is_err());
    }
}
