//! Index of a layer file. A layer is the part of a guest's memory or disk that differs from the
//! layers below. The index lists the units that the layer stores, and the units that the layer sets
//! to zero.
//!
//! A layer file is sparse and has the size of the memory or disk. Each unit is at its own offset.
//! The index is a small separate file. It contains the magic number (8 bytes), the version (u32),
//! bytes per unit (u32), the number of units (u64), and two bit maps, `stored` and `zero`. All
//! numbers are little-endian. Unit `n` is bit `n % 64` of word `n / 64`. If a unit is in neither
//! map, the layers below determine its content.

mod index_file;

pub use index_file::IndexFileError;

use index_file::IndexDecoder;

/// Size of a unit of memory layers in bytes.
pub const MEMORY_CHUNK: u32 = 64 << 10;
/// Size in bytes of a unit in sets of guest pages.
pub const MEMORY_PAGE: u32 = 4 << 10;
/// Size of a unit of disk layers in bytes.
pub const DISK_BLOCK: u32 = 4 << 10;
/// Maximum number of units: 1 TiB of disk blocks.
pub const MAX_UNITS: u64 = 1 << 28;

/// First bytes of an index.
const MAGIC: [u8; 8] = *b"JIFFYIDX";
/// Version of the format.
const VERSION: u32 = 1;
/// Length in bytes of the header, after which the two maps follow.
const HEADER_BYTES: usize = 24;

/// Error of decoding an index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IndexError {
    /// The data is not an index.
    #[error("not a layer index")]
    Magic,
    /// The version is unknown.
    #[error("layer index has version {0}, but this program supports version {VERSION}")]
    Version(u32),
    /// The fields contradict each other.
    #[error("layer index is damaged: {0}")]
    Damaged(&'static str),
}

/// A set of unit numbers below a fixed bound, as a bit map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitSet {
    /// Bound: all numbers in the set are below it.
    units: u64,
    /// Bits of the units: unit `n` is bit `n % 64` of word `n / 64`.
    words: Vec<u64>,
}

impl UnitSet {
    /// Returns an empty set for `units` units.
    pub fn empty(units: u64) -> Self {
        let words = usize::try_from(units.min(MAX_UNITS).div_ceil(64)).unwrap_or(0);
        Self {
            units: units.min(MAX_UNITS),
            words: vec![0; words],
        }
    }

    /// Returns the set of all `units` units.
    pub fn full(units: u64) -> Self {
        let mut set = Self::empty(units);
        set.insert_range(0..set.units);
        set
    }

    /// Creates a set from words in the form of [`Self::words`]. Bits at or above `units` are
    /// dropped.
    pub fn from_words(units: u64, words: &[u64]) -> Self {
        let mut set = Self::empty(units);
        for (to, from) in set.words.iter_mut().zip(words) {
            *to = *from;
        }
        // Clears the bits of the last word that are above the bound.
        let rest = set.units % 64;
        if rest != 0
            && let Some(last) = set.words.last_mut()
        {
            *last &= (1 << rest) - 1;
        }
        set
    }

    /// Returns the bound: the number of units that the set may contain.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// Returns the bits as words.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Returns whether `unit` is in the set.
    pub fn contains(&self, unit: u64) -> bool {
        usize::try_from(unit / 64)
            .ok()
            .and_then(|at| self.words.get(at))
            .is_some_and(|word| word >> (unit % 64) & 1 == 1)
    }

    /// Adds `unit`. Has no effect if it is out of bounds. Does not allocate.
    pub fn insert(&mut self, unit: u64) {
        if unit < self.units
            && let Ok(at) = usize::try_from(unit / 64)
            && let Some(word) = self.words.get_mut(at)
        {
            *word |= 1 << (unit % 64);
        }
    }

    /// Adds the units of word `at`, in the form of [`Self::words`]. Does not allocate.
    pub fn insert_word(&mut self, at: usize, word: u64) {
        let first = u64::try_from(at).map_or(u64::MAX, |at| at.saturating_mul(64));
        // Mask of the bits that belong to units below the bound.
        let valid = match self.units.saturating_sub(first) {
            0 => 0,
            units @ 1..64 => (1 << units) - 1,
            _ => u64::MAX,
        };
        if let Some(to) = self.words.get_mut(at) {
            *to |= word & valid;
        }
    }

    /// Removes `unit`.
    pub fn remove(&mut self, unit: u64) {
        if let Ok(at) = usize::try_from(unit / 64)
            && let Some(word) = self.words.get_mut(at)
        {
            *word &= !(1 << (unit % 64));
        }
    }

    /// Adds all units of `range` that are in bounds.
    pub fn insert_range(&mut self, range: std::ops::Range<u64>) {
        let (mut start, end) = (range.start, range.end.min(self.units));
        while start < end {
            // Number of bits in the current word, from 1 to 64, so no shift exceeds the width.
            let bits = (end - start).min(64 - start % 64);
            let word = u64::MAX >> (64 - bits) << (start % 64);
            let to = usize::try_from(start / 64).ok();
            if let Some(to) = to.and_then(|at| self.words.get_mut(at)) {
                *to |= word;
            }
            start += bits;
        }
    }

    /// Returns the set of larger units, of `factor` units each, that contain at least one unit of
    /// this set.
    pub fn coarser(&self, factor: u64) -> Self {
        let mut set = Self::empty(self.units.div_ceil(factor));
        for (at, &word) in (0..).zip(&self.words) {
            match word {
                // Memory maps consist mostly of empty and full words, which need no loop over their
                // bits.
                0 => {}
                u64::MAX => {
                    // Cannot overflow: the number of words is bounded by MAX_UNITS.
                    let first = at * 64;
                    set.insert_range(first / factor..(first + 64).div_ceil(factor));
                }
                _ => {
                    let units = self.iter_range(at * 64..(at + 1) * 64);
                    units.for_each(|unit| set.insert(unit / factor));
                }
            }
        }
        set
    }

    /// Returns the units of this set that are not in `other`.
    pub fn without(&self, other: &Self) -> Self {
        // Missing words of a shorter set contain no units.
        let others = other.words.iter().chain(std::iter::repeat(&0));
        let words = self.words.iter().zip(others);
        Self {
            units: self.units,
            words: words.map(|(word, other)| word & !other).collect(),
        }
    }

    /// Returns the units that are in this set or in `other`. Both must have the same bound.
    pub fn with(&self, other: &Self) -> Self {
        let others = other.words.iter().chain(std::iter::repeat(&0));
        let words = self.words.iter().zip(others);
        Self {
            units: self.units,
            words: words.map(|(word, other)| word | other).collect(),
        }
    }

    /// Returns the number of units in the set.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// Returns the units in the set in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.iter_range(0..self.units)
    }

    /// Returns the units in the set that are in `range`, in ascending order.
    pub fn iter_range(&self, range: std::ops::Range<u64>) -> impl Iterator<Item = u64> {
        // Whole words are visited. The filter below removes their units outside the range.
        let first = usize::try_from(range.start / 64).unwrap_or(usize::MAX);
        let last = usize::try_from(range.end.div_ceil(64)).unwrap_or(usize::MAX);
        let last = last.min(self.words.len());
        let words = self.words.get(first.min(last)..last).unwrap_or_default();
        let units = (range.start / 64..).zip(words).flat_map(|(at, &word)| {
            let mut rest = word;
            std::iter::from_fn(move || {
                // `then` evaluates the block only if a bit is left. `rest & (rest - 1)` clears the
                // lowest bit.
                let bit = u64::from(rest.trailing_zeros());
                (rest != 0).then(|| {
                    rest &= rest - 1;
                    at * 64 + bit
                })
            })
        });
        units.filter(move |unit| range.contains(unit))
    }
}

/// An index in memory. No unit is both stored and zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerIndex {
    /// Size of a unit in bytes.
    pub unit: u32,
    /// Units that the layer file stores.
    pub stored: UnitSet,
    /// Units that are zero, independent of the layers below.
    pub zero: UnitSet,
}

impl LayerIndex {
    /// Returns the index of a layer without content, for `bytes` bytes of memory or disk.
    pub fn empty(unit: u32, bytes: u64) -> Self {
        let units = bytes.div_ceil(u64::from(unit));
        Self {
            unit,
            stored: UnitSet::empty(units),
            zero: UnitSet::empty(units),
        }
    }

    /// Returns the number of units of the memory or disk.
    pub fn units(&self) -> u64 {
        self.stored.units
    }

    /// Returns whether the layer determines the content of `unit`.
    pub fn decides(&self, unit: u64) -> bool {
        self.stored.contains(unit) || self.zero.contains(unit)
    }

    /// Returns the length of an encoded index for `units` units, in bytes.
    pub fn encoded_len(units: u64) -> usize {
        // The fallback is small enough that the result does not overflow.
        let words = usize::try_from(units.div_ceil(64)).unwrap_or(usize::MAX / 32);
        // Two maps of 8 bytes per word follow the header.
        HEADER_BYTES + words * 16
    }

    /// Encodes the index.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::encoded_len(self.units()));
        bytes.extend(Self::header(self.unit, self.units()));
        for word in self.stored.words.iter().chain(&self.zero.words) {
            bytes.extend(word.to_le_bytes());
        }
        bytes
    }

    /// Returns the header of an encoded index. The two maps follow it.
    pub fn header(unit: u32, units: u64) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&unit.to_le_bytes());
        header[16..].copy_from_slice(&units.to_le_bytes());
        header
    }

    /// Checks that the index has units of `unit` bytes and covers `bytes` bytes.
    pub fn of(self, unit: u32, bytes: u64) -> Result<Self, IndexError> {
        if self.unit != unit {
            return Err(IndexError::Damaged("its unit has another size"));
        }
        if self.units() != bytes.div_ceil(u64::from(unit)) {
            return Err(IndexError::Damaged("the memory or disk has another size"));
        }
        Ok(self)
    }

    /// Decodes an index that [`Self::encode`] encoded, of any unit and size.
    pub fn decode_any(data: &[u8]) -> Result<Self, IndexError> {
        let (header, maps) = data.split_at_checked(HEADER_BYTES).unwrap_or((data, &[]));
        let mut decoder = IndexDecoder::new(header, data.len() as u64)?;
        decoder.push(maps)?;
        Ok(decoder.finish())
    }

    /// Returns the size of a unit in bytes and the number of units.
    fn decode_header(data: &[u8]) -> Result<(u32, u64), IndexError> {
        let (magic, rest) = data.split_first_chunk().ok_or(IndexError::Magic)?;
        if *magic != MAGIC {
            return Err(IndexError::Magic);
        }
        const SHORT: IndexError = IndexError::Damaged("it is truncated");
        let (version, rest) = rest.split_first_chunk().ok_or(SHORT)?;
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            return Err(IndexError::Version(version));
        }
        let (unit, rest) = rest.split_first_chunk().ok_or(SHORT)?;
        let (units, _) = rest.split_first_chunk().ok_or(SHORT)?;
        let unit = u32::from_le_bytes(*unit);
        let units = u64::from_le_bytes(*units);
        // The bound limits the memory that a hostile index can request.
        if unit == 0 || units > MAX_UNITS {
            return Err(IndexError::Damaged("its sizes are invalid"));
        }
        Ok((unit, units))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_inserted_without_units_beyond_the_end() {
        let mut set = UnitSet::empty(70);
        set.insert_word(1, u64::MAX);
        set.insert_word(2, 1);
        assert_eq!(set.iter().collect::<Vec<_>>(), [64, 65, 66, 67, 68, 69]);
        set.insert_word(0, u64::MAX);
        assert_eq!(set, UnitSet::full(70));
    }

    #[test]
    fn insert_range_equals_inserting_each_unit() {
        for range in [0..0, 0..1, 3..64, 63..65, 5..200, 64..128, 100..500] {
            let (mut set, mut expected) = (UnitSet::empty(200), UnitSet::empty(200));
            set.insert_range(range.clone());
            range.for_each(|unit| expected.insert(unit));
            assert_eq!(set, expected);
        }
    }

    #[test]
    fn a_coarser_set_contains_each_unit_with_a_unit_of_the_finer_set() {
        let mut set = UnitSet::empty(330);
        set.insert_range(64..128);
        set.insert(17);
        set.insert(329);
        let coarse = |factor| set.coarser(factor).iter().collect::<Vec<_>>();
        assert_eq!(coarse(16), [1, 4, 5, 6, 7, 20]);
        assert_eq!(coarse(100), [0, 1, 3]);
        assert_eq!(coarse(1), set.iter().collect::<Vec<_>>());
        assert_eq!(set.coarser(16).units(), 21);
    }

    #[test]
    fn without_returns_the_difference_of_two_sets() {
        let mut set = UnitSet::full(130);
        let other = UnitSet::full(70);
        assert_eq!(set.without(&other).iter().next(), Some(70));
        assert_eq!(other.without(&set), UnitSet::empty(70));
        set.remove(129);
        assert_eq!(set.without(&other).count(), 59);
    }

    /// Returns an index of 100 chunks, of which the last one is incomplete. Unit 100 is out of
    /// bounds and has no effect.
    fn sample() -> LayerIndex {
        let mut index = LayerIndex::empty(MEMORY_CHUNK, 100 * u64::from(MEMORY_CHUNK) - 1);
        index.stored.insert(0);
        index.stored.insert(64);
        index.zero.insert(99);
        index.zero.insert(100);
        index
    }

    #[test]
    fn an_index_survives_the_round_trip() {
        let index = sample();
        assert_eq!(index.units(), 100);
        let bytes = index.encode();
        assert_eq!(bytes.len(), LayerIndex::encoded_len(100));
        let size = 100 * u64::from(MEMORY_CHUNK);
        let decode = |unit, size| LayerIndex::decode_any(&bytes)?.of(unit, size);
        let read = decode(MEMORY_CHUNK, size).unwrap();
        assert_eq!(read, index);
        assert_eq!(read.stored.iter().collect::<Vec<_>>(), [0, 64]);
        assert_eq!((read.stored.count(), read.zero.count()), (2, 1));
        assert!(decode(MEMORY_CHUNK, size + 1).is_err());
        assert!(decode(DISK_BLOCK, size).is_err());
    }

    #[test]
    fn an_index_with_any_damage_is_refused() {
        let bytes = sample().encode();
        for length in 0..bytes.len() {
            assert!(LayerIndex::decode_any(&bytes[..length]).is_err());
        }
        // Every byte of the header (`HEADER_BYTES`).
        for at in 0..24 {
            let mut bad = bytes.clone();
            bad[at] ^= 0x80;
            let size = 100 * u64::from(MEMORY_CHUNK);
            let read = LayerIndex::decode_any(&bad).and_then(|index| index.of(MEMORY_CHUNK, size));
            assert!(read.is_err(), "{at}");
        }
        // A unit above the bound: unit 127 of 100.
        let mut beyond = bytes.clone();
        *beyond.last_mut().unwrap() = 0x80;
        assert!(LayerIndex::decode_any(&beyond).is_err());
        // Unit 0 in both maps. Each map of 100 units has two words, or 16 bytes.
        let mut both = bytes;
        both[24] |= 1;
        both[24 + 16] |= 1;
        assert!(LayerIndex::decode_any(&both).is_err());
    }
}
