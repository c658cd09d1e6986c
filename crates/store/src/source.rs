//! [`SnapshotSource`]: the open files of a snapshot on this host, as the source of a push.
//!
//! A *chunk* is 64 KiB of memory or of a disk.

use crate::data_keys::{DataKeys, Hash};
use crate::layer::{LayerKind, MAX_LAYER_CHUNKS, Run, RunKind, chunks_of};
use crate::manifest::{Attributes, CHUNK_BYTES, EngineKind, SnapshotName};
use crate::{Layer, StoreError};
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// File of a snapshot. Its holes read as zeroes.
#[derive(Debug, Clone)]
pub struct PartSource {
    /// Kind.
    pub kind: LayerKind,
    /// Name of the file.
    pub name: String,
    /// The file, which must not change.
    pub file: Arc<File>,
    /// Ranges of chunks that the ancestors have, ascending. The file is not read in these ranges.
    pub inherited: Vec<Range<u64>>,
}

/// Snapshot to push.
#[derive(Debug, Clone)]
pub struct SnapshotSource {
    /// Engine.
    pub engine: EngineKind,
    /// Time of creation in milliseconds since 1970.
    pub created_ms: u64,
    /// Versions and origin.
    pub attributes: Attributes,
    /// Ancestors in the store, nearest first.
    pub lineage: Vec<SnapshotName>,
    /// Files.
    pub parts: Vec<PartSource>,
    /// Chunks of memory that a restored guest touches first, in ascending order.
    pub working_set: Vec<u32>,
}

impl PartSource {
    fn failed(&self) -> impl FnOnce(std::io::Error) -> StoreError + '_ {
        move |source| StoreError::Io {
            path: self.name.clone().into(),
            source,
        }
    }

    /// Reads the chunk `number` of a file of `bytes` bytes into `buffer`. Returns the part of
    /// `buffer` that contains the chunk.
    pub(crate) fn read<'a>(
        &self,
        number: u64,
        bytes: u64,
        buffer: &'a mut [u8],
    ) -> Result<&'a [u8], StoreError> {
        let start = number * u64::from(CHUNK_BYTES);
        let length = bytes.saturating_sub(start).min(CHUNK_BYTES.into());
        let chunk = &mut buffer[..length as usize];
        self.file
            .read_exact_at(chunk, start)
            .map_err(self.failed())?;
        Ok(chunk)
    }

    /// Computes the runs and hashes of the part.
    pub(crate) fn hash(&self, keys: &DataKeys) -> Result<Layer, StoreError> {
        let bytes = self.file.metadata().map_err(self.failed())?.len();
        let mut layer = Layer {
            kind: self.kind,
            name: self.name.clone(),
            bytes,
            runs: Vec::new(),
            hashes: Vec::new(),
        };
        let mut inherited = self.inherited.iter().peekable();
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        let mut data = 0..0;
        for number in 0..chunks_of(bytes) {
            while inherited.next_if(|range| range.end <= number).is_some() {}
            if inherited
                .peek()
                .is_some_and(|range| range.contains(&number))
            {
                add_run(&mut layer.runs, RunKind::Inherited);
                continue;
            }
            let range = layer.chunk_range(number);
            if data.end <= range.start {
                data = next_data(&self.file, range.start, bytes).map_err(self.failed())?;
            }
            if data.start >= range.end {
                add_run(&mut layer.runs, RunKind::Zero);
                continue;
            }
            let chunk = self.read(number, bytes, &mut buffer)?;
            if is_zero(chunk) {
                add_run(&mut layer.runs, RunKind::Zero)
            } else {
                add_run(&mut layer.runs, RunKind::Stored);
                layer.hashes.push(keys.chunk_hash(chunk));
            }
            if layer.hashes.len() > MAX_LAYER_CHUNKS {
                return Err(StoreError::Source(format!(
                    "{} has too much data",
                    self.name
                )));
            }
        }
        Ok(layer)
    }
}

/// Returns true if all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

fn add_run(runs: &mut Vec<Run>, kind: RunKind) {
    match runs.last_mut() {
        Some(last) if last.kind == kind && last.chunks < u32::MAX => last.chunks += 1,
        _ => runs.push(Run { kind, chunks: 1 }),
    }
}

/// Returns the first range with data at or after `from`. If none exists, returns a range beyond the
/// end of any file.
fn next_data(file: &File, from: u64, end: u64) -> std::io::Result<Range<u64>> {
    let offset = i64::try_from(from).map_err(std::io::Error::other)?;
    let start = match lseek(file, offset, Whence::SeekData) {
        Ok(start) => start,
        Err(Errno::ENXIO) => return Ok(u64::MAX - 1..u64::MAX),
        // Some file systems do not report holes.
        Err(Errno::EINVAL | Errno::EOPNOTSUPP) => return Ok(from..end),
        Err(e) => return Err(e.into()),
    };
    let stop = lseek(file, start, Whence::SeekHole)?;
    Ok(start.cast_unsigned()..stop.cast_unsigned())
}

/// Stored chunk of a source: index of its part, number in the part, and hash.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChunkPlace {
    pub part: usize,
    pub number: u64,
    pub hash: Hash,
}

/// Returns the stored chunks, starting with the working set.
pub(crate) fn in_push_order(layers: &[Layer], working_set: &[u32]) -> Vec<ChunkPlace> {
    let mut first = Vec::new();
    let mut rest = Vec::new();
    let ranks: std::collections::HashMap<u64, usize> = working_set
        .iter()
        .map(|&chunk| u64::from(chunk))
        .zip(0..)
        .collect();
    for (part, layer) in layers.iter().enumerate() {
        for (number, hash) in layer.stored() {
            let place = ChunkPlace { part, number, hash };
            match ranks.get(&number) {
                Some(&rank) if layer.kind == LayerKind::Memory => first.push((rank, place)),
                _ => rest.push(place),
            }
        }
    }
    first.sort_by_key(|(rank, _)| *rank);
    first
        .into_iter()
        .map(|(_, place)| place)
        .chain(rest)
        .collect()
}
