//! Checksums of a snapshot's chunks (`seal.json`), which detect damage. A store that shares equal
//! chunks between snapshots identifies the chunks by their checksums.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *unit* is the smallest part that a layer stores: a chunk of 64 KiB of
//! memory, or a block of 4 KiB of a disk.

use crate::SnapshotError;
use crate::snapshot::{MEMORY_INDEX, MEMORY_LAYER, STATE, Snapshot, disk_index, disk_layer};
use crate::snapshot_dir::SnapshotDir;
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Name of the file with the checksums.
pub(crate) const CHECKSUMS_FILE: &str = "seal.json";
/// Maximum size of [`CHECKSUMS_FILE`], in bytes.
const MAX_CHECKSUMS_BYTES: u64 = 256 << 20;
/// Maximum size in bytes of a small file: the state, or an index. A small file is hashed as a
/// whole.
const MAX_SMALL_FILE_BYTES: u64 = 128 << 20;
/// Number of chunks that are hashed between two checks that the snapshot still exists.
const CHUNKS_PER_CHECK: usize = 256;

/// Content of `seal.json`: BLAKE3 hashes in hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checksums {
    /// Hashes of small files (state and indexes), by name.
    pub files: BTreeMap<String, String>,
    /// Hashes of 64 KiB chunks, by layer file and chunk number. Only chunks with stored units have
    /// a hash. In a chunk of a disk, blocks that the layer does not store are hashed as zeroes.
    pub chunks: BTreeMap<String, BTreeMap<u64, String>>,
}

/// Chunk or file that differs from its checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedChunk {
    /// File in the snapshot's directory.
    pub file: String,
    /// Number of the 64 KiB chunk. `None` if the whole file is hashed.
    pub chunk: Option<u64>,
}

/// Result of [`Snapshot::verify`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VerifyResult {
    /// The snapshot has no checksums.
    #[serde(rename = "unsealed")]
    NoChecksums,
    /// All checksums match.
    #[serde(rename = "sound")]
    Intact,
    /// Chunks and files that differ from their checksums.
    Damaged(Vec<DamagedChunk>),
}

/// Computes all checksums. Stops if `still_exists` returns `false` because the snapshot was removed
/// or replaced.
fn compute(
    snapshot: &Snapshot,
    dir: &SnapshotDir<'_>,
    still_exists: &dyn Fn() -> bool,
) -> Result<Checksums, SnapshotError> {
    let mut files = BTreeMap::new();
    let mut chunks = BTreeMap::new();
    let mut layers = vec![(MEMORY_LAYER.to_owned(), MEMORY_INDEX.to_owned())];
    layers.extend((0..snapshot.manifest().disks.len()).map(|n| (disk_layer(n), disk_index(n))));
    let mut whole = |name: &str| {
        let bytes = dir.read(name, MAX_SMALL_FILE_BYTES)?;
        let hash = blake3::hash(&bytes).to_hex().to_string();
        files.insert(name.to_owned(), hash);
        Ok(bytes)
    };
    whole(STATE)?;
    for (layer, index) in layers {
        let path = dir.path(&index);
        // Decode the bytes that were hashed: a second read could return other bytes.
        let index = LayerIndex::decode_any(&whole(&index)?).map_err(SnapshotError::index(&path))?;
        let path = dir.path(&layer);
        let file = dir.open(&layer)?;
        let hashes = hash_layer(&file, &index, still_exists)
            .map_err(SnapshotError::io(&path))?
            .ok_or_else(|| SnapshotError::Missing(snapshot.id().to_owned()))?;
        chunks.insert(layer, hashes);
    }
    Ok(Checksums { files, chunks })
}

/// Hashes the stored chunks of a layer. `None` if `still_exists` returned `false`.
fn hash_layer(
    file: &File,
    index: &LayerIndex,
    still_exists: &dyn Fn() -> bool,
) -> std::io::Result<Option<BTreeMap<u64, String>>> {
    let unit = u64::from(index.unit);
    // Disk layers have several units per chunk, memory layers one.
    let units_per_chunk = (u64::from(MEMORY_CHUNK) / unit).max(1);
    let length = file.metadata()?.len();
    let mut hashes = BTreeMap::new();
    let mut chunk: Option<u64> = None;
    let mut bytes = vec![0; MEMORY_CHUNK as usize];
    for unit_number in index.stored.iter() {
        let number = unit_number / units_per_chunk;
        // The unit belongs to another chunk: finish the previous chunk.
        if chunk != Some(number) {
            if let Some(at) = chunk.replace(number) {
                hashes.insert(at, blake3::hash(&bytes).to_hex().to_string());
                if hashes.len() % CHUNKS_PER_CHECK == 0 && !still_exists() {
                    return Ok(None);
                }
            }
            // Units that the layer does not store are hashed as zeroes.
            bytes.fill(0);
        }
        let start = unit_number * unit;
        // The last unit of a file may be shorter than the others.
        let end = length.min(start + unit);
        let at = (start - number * units_per_chunk * unit) as usize;
        if let Some(part) = bytes.get_mut(at..at + (end - start) as usize) {
            file.read_exact_at(part, start)?;
        }
    }
    if let Some(at) = chunk {
        hashes.insert(at, blake3::hash(&bytes).to_hex().to_string());
    }
    Ok(Some(hashes))
}

/// Computes and stores the checksums of a snapshot, unless they exist.
pub(crate) fn write(snapshot: &Snapshot) -> Result<(), SnapshotError> {
    // Use the open directory, not its path: a merge replaces the directory at the path.
    let dir = SnapshotDir::at(snapshot.path())?;
    if dir.find(CHECKSUMS_FILE)?.is_some() {
        return Ok(());
    }
    // Reject a snapshot with missing chunks: the hash of a hole in a file would be recorded as
    // correct.
    snapshot.check_complete()?;
    let checksums = compute(snapshot, &dir, &|| dir.is_still_named())?;
    let path = dir.path(CHECKSUMS_FILE);
    let text = serde_json::to_vec(&checksums).map_err(|e| SnapshotError::damaged(&path, e))?;
    dir.create_once(CHECKSUMS_FILE, &text)
}

/// Reads the checksums of a snapshot. `None` if it has none.
fn recorded(dir: &SnapshotDir<'_>) -> Result<Option<Checksums>, SnapshotError> {
    if dir.find(CHECKSUMS_FILE)?.is_none() {
        return Ok(None);
    }
    let path = dir.path(CHECKSUMS_FILE);
    let bytes = dir.read(CHECKSUMS_FILE, MAX_CHECKSUMS_BYTES)?;
    let recorded = serde_json::from_slice(&bytes);
    recorded.map_err(|e| SnapshotError::damaged(&path, e))
}

/// Compares the small files of a snapshot with its checksums, if it has checksums.
pub(crate) fn verify_small_files(snapshot: &Snapshot) -> Result<(), SnapshotError> {
    let dir = SnapshotDir::at(snapshot.path())?;
    let Some(recorded) = recorded(&dir)? else {
        return Ok(());
    };
    for (name, hash) in recorded.files {
        let bytes = dir.read(&name, MAX_SMALL_FILE_BYTES)?;
        if *blake3::hash(&bytes).to_hex() != *hash {
            let reason = "the checksum differs";
            return Err(SnapshotError::damaged(&dir.path(&name), reason));
        }
    }
    Ok(())
}

/// Compares all files of a snapshot with its checksums.
pub(crate) fn verify(snapshot: &Snapshot) -> Result<VerifyResult, SnapshotError> {
    let dir = SnapshotDir::at(snapshot.path())?;
    let Some(recorded) = recorded(&dir)? else {
        return Ok(VerifyResult::NoChecksums);
    };
    let now = compute(snapshot, &dir, &|| dir.is_still_named())?;
    let damages = compare(&recorded, &now);
    Ok(if damages.is_empty() {
        VerifyResult::Intact
    } else {
        VerifyResult::Damaged(damages)
    })
}

/// Returns the files and chunks whose checksums differ.
fn compare(recorded: &Checksums, now: &Checksums) -> Vec<DamagedChunk> {
    let mut damages = Vec::new();
    for file in differing(&recorded.files, &now.files) {
        damages.push(DamagedChunk {
            file: file.clone(),
            chunk: None,
        });
    }
    let none = BTreeMap::new();
    // A layer that is only on one side differs in all its chunks.
    let layers: BTreeSet<&String> = recorded.chunks.keys().chain(now.chunks.keys()).collect();
    for layer in layers {
        let of = |checksums: &'_ Checksums| checksums.chunks.get(layer).unwrap_or(&none).clone();
        damages.extend(
            differing(&of(recorded), &of(now)).map(|&chunk| DamagedChunk {
                file: layer.clone(),
                chunk: Some(chunk),
            }),
        );
    }
    damages
}

/// Returns the keys that only one map contains or whose values differ, in ascending order.
fn differing<'a, K: Ord>(
    a: &'a BTreeMap<K, String>,
    b: &'a BTreeMap<K, String>,
) -> impl Iterator<Item = &'a K> {
    let keys: BTreeSet<&K> = a.keys().chain(b.keys()).collect();
    keys.into_iter().filter(|key| a.get(key) != b.get(key))
}
