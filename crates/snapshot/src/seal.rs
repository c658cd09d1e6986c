//! Hashes of what a snapshot holds, for finding damage and, chunk by chunk, for a store that shares equal chunks.

use crate::SnapshotError;
use crate::dir::Dir;
use crate::snapshot::{MEMORY_INDEX, MEMORY_LAYER, STATE, Snapshot, disk_index, disk_layer};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

const SEAL: &str = "seal.json";
const MAX_SEAL: u64 = 256 << 20;
const MAX_WHOLE: u64 = 128 << 20;
/// Pieces hashed between two looks at whether the snapshot is still there.
const LOOK_AGAIN: usize = 256;

/// `seal.json`: BLAKE3 hashes in hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seal {
    /// Of small files as a whole.
    pub files: BTreeMap<String, String>,
    /// Of layers in pieces of 64 KiB, by the number of the piece. Only pieces with something in them are there; a piece of a
    /// disk counts blocks that the layer does not hold as zeroes.
    pub chunks: BTreeMap<String, BTreeMap<u64, String>>,
}

/// Something that is not as it was sealed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// File in the snapshot's directory.
    pub file: String,
    /// Number of the piece of 64 KiB; none if the file was sealed as a whole.
    pub chunk: Option<u64>,
}

/// What [`Snapshot::verify`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It was never sealed: there is nothing to compare with.
    Unsealed,
    /// Every byte is as it was sealed.
    Sound,
    /// What is not.
    Damaged(Vec<Damage>),
}

/// Hashes everything. `there` tells whether to go on: a snapshot that is being removed is not worth it.
fn make(
    snapshot: &Snapshot,
    dir: &Dir<'_>,
    there: &dyn Fn() -> bool,
) -> Result<Seal, SnapshotError> {
    let mut files = BTreeMap::new();
    let mut chunks = BTreeMap::new();
    let mut layers = vec![(MEMORY_LAYER.to_owned(), MEMORY_INDEX.to_owned())];
    layers.extend((0..snapshot.manifest().disks.len()).map(|n| (disk_layer(n), disk_index(n))));
    let mut whole = |name: &str| {
        let bytes = dir.read(name, MAX_WHOLE)?;
        let hash = blake3::hash(&bytes).to_hex().to_string();
        files.insert(name.to_owned(), hash);
        Ok(bytes)
    };
    whole(STATE)?;
    for (layer, index) in layers {
        let path = dir.path(&index);
        let index = LayerIndex::decode_any(&whole(&index)?).map_err(SnapshotError::index(&path))?;
        let path = dir.path(&layer);
        let file = dir.open(&layer)?;
        let hashes = hash_layer(&file, &index, there).map_err(SnapshotError::io(&path))?;
        let hashes = hashes.ok_or_else(|| SnapshotError::Missing(snapshot.id().to_owned()))?;
        chunks.insert(layer, hashes);
    }
    Ok(Seal { files, chunks })
}

/// None if told to stop.
fn hash_layer(
    file: &File,
    index: &LayerIndex,
    there: &dyn Fn() -> bool,
) -> std::io::Result<Option<BTreeMap<u64, String>>> {
    let unit = u64::from(index.unit);
    let per_piece = (u64::from(MEMORY_CHUNK) / unit).max(1);
    let length = file.metadata()?.len();
    let mut hashes = BTreeMap::new();
    let mut piece: Option<u64> = None;
    let mut bytes = vec![0; MEMORY_CHUNK as usize];
    for unit_number in index.stored.iter() {
        let number = unit_number / per_piece;
        if piece != Some(number) {
            if let Some(at) = piece.replace(number) {
                hashes.insert(at, blake3::hash(&bytes).to_hex().to_string());
                if hashes.len() % LOOK_AGAIN == 0 && !there() {
                    return Ok(None);
                }
            }
            bytes.fill(0);
        }
        let start = unit_number * unit;
        let end = length.min(start + unit);
        let at = (start - number * per_piece * unit) as usize;
        if let Some(part) = bytes.get_mut(at..at + (end - start) as usize) {
            file.read_exact_at(part, start)?;
        }
    }
    if let Some(at) = piece {
        hashes.insert(at, blake3::hash(&bytes).to_hex().to_string());
    }
    Ok(Some(hashes))
}

pub(crate) fn write(snapshot: &Snapshot) -> Result<(), SnapshotError> {
    // The directory itself, not its name: a merge puts another one in its place.
    let dir = Dir::at(snapshot.path())?;
    if dir.find(SEAL)?.is_some() {
        return Ok(());
    }
    let seal = make(snapshot, &dir, &|| dir.is_still_named())?;
    let path = dir.path(SEAL);
    let text = serde_json::to_vec(&seal).map_err(|e| SnapshotError::damaged(&path, e))?;
    dir.put_once(SEAL, &text)
}

pub(crate) fn verify(snapshot: &Snapshot) -> Result<Verdict, SnapshotError> {
    let dir = Dir::at(snapshot.path())?;
    if dir.find(SEAL)?.is_none() {
        return Ok(Verdict::Unsealed);
    }
    let path = dir.path(SEAL);
    let sealed: Seal = serde_json::from_slice(&dir.read(SEAL, MAX_SEAL)?)
        .map_err(|e| SnapshotError::damaged(&path, e))?;
    let now = make(snapshot, &dir, &|| dir.is_still_named())?;
    let damages = compare(&sealed, &now);
    Ok(match damages.is_empty() {
        true => Verdict::Sound,
        false => Verdict::Damaged(damages),
    })
}

fn compare(sealed: &Seal, now: &Seal) -> Vec<Damage> {
    let mut damages = Vec::new();
    for file in differing(&sealed.files, &now.files) {
        damages.push(Damage {
            file: file.clone(),
            chunk: None,
        });
    }
    let none = BTreeMap::new();
    let layers: BTreeSet<&String> = sealed.chunks.keys().chain(now.chunks.keys()).collect();
    for layer in layers {
        let of = |seal: &'_ Seal| seal.chunks.get(layer).unwrap_or(&none).clone();
        damages.extend(differing(&of(sealed), &of(now)).map(|&chunk| Damage {
            file: layer.clone(),
            chunk: Some(chunk),
        }));
    }
    damages
}

/// Keys whose values differ, or that only one of the two has, ascending.
fn differing<'a, K: Ord>(
    a: &'a BTreeMap<K, String>,
    b: &'a BTreeMap<K, String>,
) -> impl Iterator<Item = &'a K> {
    let keys: BTreeSet<&K> = a.keys().chain(b.keys()).collect();
    keys.into_iter().filter(|key| a.get(key) != b.get(key))
}
