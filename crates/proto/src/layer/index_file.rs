//! Reading and writing of layer indexes in files. The index of a layer has two bit maps: one of the
//! units that the layer stores, and one of the units that it sets to zero. A unit is a chunk of
//! memory or a block of a disk.
//!
//! The maps have a fixed length and consist mostly of zeros, so zero parts are holes that are
//! neither written nor read. For example, the index for a disk of 10 GiB has 640 KiB, but a sandbox
//! that was paused after a moment has written only a few blocks.

use super::{HEADER_BYTES, IndexError, LayerIndex, UnitSet};
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Number of bytes read at once. It is below the allocator's threshold for separate mappings, so
/// that the memory of one index is reused for the next.
const READ_BYTES: usize = 64 << 10;
/// Size of a word of a map in bytes.
const WORD_BYTES: usize = 8;
/// Size in bytes of a part that is skipped if it is zero.
const PART_BYTES: usize = 4 << 10;

/// Error of reading an index from a file.
#[derive(Debug, thiserror::Error)]
pub enum IndexFileError {
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file does not contain an index.
    #[error(transparent)]
    Index(#[from] IndexError),
}

impl From<IndexFileError> for io::Error {
    fn from(error: IndexFileError) -> Self {
        match error {
            IndexFileError::Io(error) => error,
            IndexFileError::Index(error) => Self::other(error),
        }
    }
}

/// An index that is being decoded from the bytes after its header.
pub(super) struct IndexDecoder {
    index: LayerIndex,
    /// Number of decoded words of both maps together.
    words: usize,
}

impl IndexDecoder {
    /// Decodes the header of an index file of `length` bytes.
    pub(super) fn new(header: &[u8], length: u64) -> Result<Self, IndexError> {
        let (unit, units) = LayerIndex::decode_header(header)?;
        if usize::try_from(length) != Ok(LayerIndex::encoded_len(units)) {
            return Err(IndexError::Damaged("its length is incorrect"));
        }
        let index = LayerIndex {
            unit,
            stored: UnitSet::empty(units),
            zero: UnitSet::empty(units),
        };
        Ok(Self { index, words: 0 })
    }

    /// Skips words that are zero.
    fn skip(&mut self, words: usize) {
        self.words += words;
    }

    /// Decodes further words. If all words of a part are zero, the memory of the maps is not
    /// accessed.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(), IndexError> {
        let count = self.index.stored.words.len();
        for part in bytes.chunks(PART_BYTES) {
            // The length of the file is a multiple of the word size, so no byte remains.
            let words = part.as_chunks().0;
            if is_zero(part) {
                self.skip(words.len());
                continue;
            }
            for &word in words {
                let (at, word) = (self.words, u64::from_le_bytes(word));
                self.words += 1;
                if word == 0 {
                    continue;
                }
                // The map `stored` comes first, then the map `zero`.
                let (set, at) = match at.checked_sub(count) {
                    None => (&mut self.index.stored, at),
                    Some(at) => (&mut self.index.zero, at),
                };
                set.insert_word(at, word);
                // `insert_word` drops bits above the bound. A difference means that the file
                // contains such bits.
                let inserted = set.words.get(at) == Some(&word);
                let both = self
                    .index
                    .stored
                    .words
                    .get(at)
                    .zip(self.index.zero.words.get(at));
                // A unit must not be both stored and zero.
                if !inserted || both.is_none_or(|(stored, zero)| stored & zero != 0) {
                    return Err(IndexError::Damaged("its maps contradict each other"));
                }
            }
        }
        Ok(())
    }

    pub(super) fn finish(self) -> LayerIndex {
        self.index
    }
}

/// Returns the first part of `range` that is not a hole, in whole words. If there is none, returns
/// an empty range at the end.
fn next_data(file: &File, range: Range<u64>) -> io::Result<Range<u64>> {
    let seek = |from: u64, whence| {
        let found = lseek(
            file,
            i64::try_from(from).map_err(|_| Errno::EOVERFLOW)?,
            whence,
        )?;
        u64::try_from(found).map_err(|_| Errno::EOVERFLOW)
    };
    let start = match seek(range.start, Whence::SeekData) {
        Ok(start) => start.min(range.end),
        // Only a hole follows up to the end of the file.
        Err(Errno::ENXIO) => range.end,
        // The file system does not support holes.
        Err(Errno::EINVAL) => return Ok(range),
        Err(e) => return Err(e.into()),
    };
    if start == range.end {
        return Ok(start..start);
    }
    let end = seek(start, Whence::SeekHole)?.min(range.end);
    let word = WORD_BYTES as u64;
    // A hole need not begin and end at a word.
    let start = start / word * word;
    Ok(start..end.next_multiple_of(word).clamp(start + word, range.end))
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |or, &byte| or | byte) == 0
}

impl LayerIndex {
    /// Reads an index of any unit and size from the start of a file of at most `limit` bytes. Holes
    /// are not read. The call changes the file's offset but does not depend on it.
    pub fn read(file: &File, limit: u64) -> Result<Self, IndexFileError> {
        // The limit is checked before memory of the claimed size is allocated.
        let length = file.metadata()?.len();
        if length > limit {
            let reason = format!("it has {length} bytes, but the limit is {limit}");
            return Err(io::Error::other(reason).into());
        }
        let mut header = [0; HEADER_BYTES];
        // A shorter file is read completely, so that the decoder reports its error.
        let read = length.min(HEADER_BYTES as u64) as usize;
        let header = header.get_mut(..read).unwrap_or_default();
        file.read_exact_at(header, 0)?;
        let mut decoder = IndexDecoder::new(header, length)?;
        let mut buffer = vec![0; READ_BYTES];
        let mut at = HEADER_BYTES as u64;
        while at < length {
            let data = next_data(file, at..length)?;
            decoder.skip((data.start - at) as usize / WORD_BYTES);
            at = data.start;
            while at < data.end {
                let bytes = (data.end - at).min(READ_BYTES as u64);
                let part = buffer.get_mut(..bytes as usize).unwrap_or_default();
                file.read_exact_at(part, at)?;
                decoder.push(part)?;
                at += bytes;
            }
        }
        Ok(decoder.finish())
    }

    /// Writes the index to an empty file. Zero parts become holes.
    pub fn write(&self, file: &File) -> io::Result<()> {
        let length = Self::encoded_len(self.units()) as u64;
        let mut at = HEADER_BYTES as u64;
        file.write_all_at(&Self::header(self.unit, self.units()), 0)?;
        let mut bytes = Vec::with_capacity(PART_BYTES);
        for map in [&self.stored, &self.zero] {
            for words in map.words.chunks(PART_BYTES / WORD_BYTES) {
                let end = at + (words.len() * WORD_BYTES) as u64;
                // The last part is always written, since it determines the length of the file.
                if end == length || words.iter().any(|&word| word != 0) {
                    bytes.clear();
                    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
                    file.write_all_at(&bytes, at)?;
                }
                at = end;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "index_file_tests.rs"]
mod tests;
