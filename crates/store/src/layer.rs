//! Part of a snapshot: a layer of memory or of a disk, device state or a file.
//!
//! A *chunk* is 64 KiB of memory or of a disk. The *ancestors* of a snapshot are the snapshots on
//! which it is based. The *root* of a part or snapshot is the hash that identifies its content.
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 4 | kind: 1 memory, 2 disk, 3 device state, 4 file |
//! | 4 | 4 | number of the disk, otherwise 0 |
//! | 8 | 8 | length in bytes |
//! | 16 | | name after its length (u16): 1 to 255 graphic ASCII characters without `/` |
//! | | 4 | number of runs, then each run as 4 bytes of kind and 4 of length in chunks |
//! | | 4 | number of hashes, then the hashes of the stored chunks in order |
//!
//! A *run* is a sequence of chunks with the same source: 0 stored in this layer, 1 zero, 2
//! inherited from the ancestors. The root of a part is the keyed hash of length, runs and leaves. A
//! leaf is the keyed hash of up to 1,024 chunk hashes.

use crate::FormatError;
use crate::codec::{Reader, put_count, put_string};
use crate::data_keys::{DataKeys, HASH_BYTES, Hash, HashOf};
use crate::manifest::CHUNK_BYTES;
use std::ops::Range;

/// Number of hashes per leaf.
pub const LEAF_HASHES: usize = 1024;
/// Maximum length of a layer in bytes: 16 TiB.
pub const MAX_LAYER_BYTES: u64 = 16 << 40;
/// Maximum number of stored chunks of a layer: 512 GiB.
pub const MAX_LAYER_CHUNKS: usize = 8 << 20;
/// Maximum number of runs of a part.
const MAX_RUNS: usize = 16 << 20;
/// Maximum length of the name of a part.
const MAX_NAME_BYTES: usize = 255;
/// Length in bytes of a layer without runs and hashes, and with a name of one byte.
pub(crate) const MIN_LAYER_BYTES: usize = 4 + 4 + 8 + 2 + 1 + 4 + 4;
/// Length in bytes of an encoded run.
const RUN_BYTES: usize = 8;

/// Kind of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Guest memory.
    Memory,
    /// Writable disk with this number.
    Disk(u32),
    /// State of vCPUs and devices.
    DeviceState,
    /// Any other file.
    File,
}

/// Source of the chunks of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunKind {
    /// Chunks stored in this layer.
    Stored,
    /// Zeroes.
    Zero,
    /// Chunks of the ancestors' layers.
    Inherited,
}

/// Consecutive chunks with the same source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Source.
    pub kind: RunKind,
    /// Number of chunks, at least 1.
    pub chunks: u32,
}

/// Part of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Kind.
    pub kind: LayerKind,
    /// Name of the file.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Sources of its chunks. Adjacent runs have different kinds.
    pub runs: Vec<Run>,
    /// Hashes of the stored chunks.
    pub hashes: Vec<Hash>,
}

/// Returns the number of chunks of `bytes` bytes.
pub fn chunks_of(bytes: u64) -> u64 {
    bytes.div_ceil(CHUNK_BYTES.into())
}

/// Checks the name of a part.
pub(crate) fn check_name(name: &str) -> Result<(), FormatError> {
    let good = |b: u8| b.is_ascii_graphic() && b != b'/';
    let dots = name == "." || name == "..";
    if (1..=MAX_NAME_BYTES).contains(&name.len()) && !dots && name.bytes().all(good) {
        Ok(())
    } else {
        Err(FormatError::Damaged(
            "the name of a part is not a file name",
        ))
    }
}

impl Layer {
    /// Returns the number of its chunks, stored or not.
    pub fn chunks(&self) -> u64 {
        chunks_of(self.bytes)
    }

    /// Returns the byte range of chunk `number`.
    pub fn chunk_range(&self, number: u64) -> Range<u64> {
        let start = number * u64::from(CHUNK_BYTES);
        start..self.bytes.min(start + u64::from(CHUNK_BYTES))
    }

    /// Returns numbers and hashes of the stored chunks in ascending order.
    pub fn stored(&self) -> impl Iterator<Item = (u64, Hash)> {
        let mut at = 0;
        let numbers = self.runs.iter().flat_map(move |run| {
            let first = at;
            at += u64::from(run.chunks);
            match run.kind {
                RunKind::Stored => first..at,
                RunKind::Zero | RunKind::Inherited => 0..0,
            }
        });
        numbers.zip(self.hashes.iter().copied())
    }

    /// Returns the chunk ranges of the runs of `kind`.
    pub fn ranges(&self, kind: RunKind) -> impl Iterator<Item = Range<u64>> {
        let mut at = 0;
        self.runs.iter().filter_map(move |run| {
            let first = at;
            at += u64::from(run.chunks);
            (run.kind == kind).then_some(first..at)
        })
    }

    /// Appends all fields before the number of hashes.
    pub(crate) fn encode_head(&self, to: &mut Vec<u8>) -> Result<(), FormatError> {
        let (kind, number): (u32, u32) = match self.kind {
            LayerKind::Memory => (1, 0),
            LayerKind::Disk(number) => (2, number),
            LayerKind::DeviceState => (3, 0),
            LayerKind::File => (4, 0),
        };
        to.extend(kind.to_le_bytes());
        to.extend(number.to_le_bytes());
        to.extend(self.bytes.to_le_bytes());
        put_string(to, &self.name)?;
        self.encode_runs(to)
    }

    /// Appends the number of runs and the runs.
    fn encode_runs(&self, to: &mut Vec<u8>) -> Result<(), FormatError> {
        put_count(to, self.runs.len())?;
        for run in &self.runs {
            let kind: u32 = match run.kind {
                RunKind::Stored => 0,
                RunKind::Zero => 1,
                RunKind::Inherited => 2,
            };
            to.extend(kind.to_le_bytes());
            to.extend(run.chunks.to_le_bytes());
        }
        Ok(())
    }

    pub(crate) fn encode(&self, to: &mut Vec<u8>) -> Result<(), FormatError> {
        self.encode_head(to)?;
        put_count(to, self.hashes.len())?;
        to.extend(self.hashes.iter().flat_map(|hash| hash.0));
        Ok(())
    }

    /// Returns the root of the part. Parts with equal content have equal roots, independently of
    /// their names.
    pub fn root(&self, keys: &DataKeys) -> Result<Hash, FormatError> {
        let mut bytes = Vec::new();
        bytes.extend(self.bytes.to_le_bytes());
        self.encode_runs(&mut bytes)?;
        for leaf in self.hashes.chunks(LEAF_HASHES) {
            let hashes: Vec<u8> = leaf.iter().flat_map(|hash| hash.0).collect();
            bytes.extend(keys.hash(HashOf::Leaf, &hashes).0);
        }
        Ok(keys.hash(HashOf::Layer, &bytes))
    }

    /// Decodes and checks a part of a manifest.
    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, FormatError> {
        let kind = match (reader.u32()?, reader.u32()?) {
            (1, 0) => LayerKind::Memory,
            (2, number) => LayerKind::Disk(number),
            (3, 0) => LayerKind::DeviceState,
            (4, 0) => LayerKind::File,
            _ => return Err(FormatError::Damaged("the kind of a part is unknown")),
        };
        let bytes = reader.u64()?;
        let name = reader.string()?;
        check_name(&name)?;
        if bytes > MAX_LAYER_BYTES {
            return Err(FormatError::Damaged("a layer is too long"));
        }
        let (mut total, mut stored) = (0u64, 0u64);
        let mut runs: Vec<Run> = Vec::new();
        for _ in 0..reader.count(RUN_BYTES, MAX_RUNS)? {
            let run = run(reader)?;
            total += u64::from(run.chunks);
            if run.kind == RunKind::Stored {
                stored += u64::from(run.chunks);
            }
            if run.chunks == 0 || runs.last().is_some_and(|last| last.kind == run.kind) {
                return Err(FormatError::Damaged("its runs are not in normal form"));
            }
            runs.push(run);
        }
        let hashes = reader.count(HASH_BYTES, MAX_LAYER_CHUNKS)?;
        if total != chunks_of(bytes) || stored != hashes as u64 {
            return Err(FormatError::Damaged(
                "its runs do not match its length or hashes",
            ));
        }
        let (hashes, _) = reader.bytes(hashes * HASH_BYTES)?.as_chunks();
        Ok(Self {
            kind,
            name,
            bytes,
            runs,
            hashes: hashes.iter().map(|hash| Hash(*hash)).collect(),
        })
    }
}

/// Decodes a run.
fn run(reader: &mut Reader<'_>) -> Result<Run, FormatError> {
    let kind = match reader.u32()? {
        0 => RunKind::Stored,
        1 => RunKind::Zero,
        2 => RunKind::Inherited,
        _ => return Err(FormatError::Damaged("the kind of a run is unknown")),
    };
    Ok(Run {
        kind,
        chunks: reader.u32()?,
    })
}

const _: () = assert!(size_of::<Hash>() == HASH_BYTES);
