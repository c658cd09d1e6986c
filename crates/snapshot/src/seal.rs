//! Hashes of what a snapshot holds, for finding damage and, chunk by chunk, for a store that shares equal chunks.

use crate::SnapshotError;
use crate::snapshot::{MEMORY_INDEX, MEMORY_LAYER, STATE, Snapshot, disk_index, disk_layer, read};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;

const SEAL: &str = "seal.json";
const MAX_SEAL: u64 = 256 << 20;
const MAX_WHOLE: u64 = 128 << 20;

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

fn make(snapshot: &Snapshot) -> Result<Seal, SnapshotError> {
    let mut files = BTreeMap::new();
    let mut chunks = BTreeMap::new();
    let mut layers = vec![(MEMORY_LAYER.to_owned(), MEMORY_INDEX.to_owned())];
    layers.extend((0..snapshot.manifest().disks.len()).map(|n| (disk_layer(n), disk_index(n))));
    let mut whole = |name: &str| {
        let bytes = read(&snapshot.path().join(name), MAX_WHOLE)?;
        let hash = blake3::hash(&bytes).to_hex().to_string();
        files.insert(name.to_owned(), hash);
        Ok(bytes)
    };
    whole(STATE)?;
    for (layer, index) in layers {
        let path = snapshot.path().join(&index);
        let index = LayerIndex::decode_any(&whole(&index)?).map_err(SnapshotError::index(&path))?;
        let path = snapshot.path().join(&layer);
        let file = File::open(&path).map_err(SnapshotError::io(&path))?;
        let hashes = hash_layer(&file, &index).map_err(SnapshotError::io(&path))?;
        chunks.insert(layer, hashes);
    }
    Ok(Seal { files, chunks })
}

fn hash_layer(file: &File, index: &LayerIndex) -> std::io::Result<BTreeMap<u64, String>> {
    let unit = u64::from(index.unit);
    let per_piece = (u64::from(MEMORY_CHUNK) / unit).max(1);
    let length = file.metadata()?.len();
    let mut hashes = BTreeMap::new();
    let mut piece: Option<(u64, Vec<u8>)> = None;
    for unit_number in index.stored.iter() {
        let number = unit_number / per_piece;
        if piece.as_ref().is_none_or(|(at, _)| *at != number) {
            if let Some((at, bytes)) = piece.take() {
                hashes.insert(at, blake3::hash(&bytes).to_hex().to_string());
            }
            piece = Some((number, vec![0; MEMORY_CHUNK as usize]));
        }
        if let Some((_, bytes)) = &mut piece {
            let start = unit_number * unit;
            let end = length.min(start + unit);
            let at = (start - number * per_piece * unit) as usize;
            if let Some(part) = bytes.get_mut(at..at + (end - start) as usize) {
                file.read_exact_at(part, start)?;
            }
        }
    }
    if let Some((at, bytes)) = piece {
        hashes.insert(at, blake3::hash(&bytes).to_hex().to_string());
    }
    Ok(hashes)
}

pub(crate) fn write(snapshot: &Snapshot) -> Result<(), SnapshotError> {
    let path = snapshot.path().join(SEAL);
    if path.exists() {
        return Ok(());
    }
    let seal = make(snapshot)?;
    let text = serde_json::to_vec(&seal).map_err(|e| SnapshotError::damaged(&path, e))?;
    let new = snapshot
        .path()
        .join(format!("{SEAL}.{}", std::process::id()));
    let put = || -> std::io::Result<()> {
        let mut file = File::create(&new)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&new, &path)
    };
    put().map_err(SnapshotError::io(&path))
}

pub(crate) fn verify(snapshot: &Snapshot) -> Result<bool, SnapshotError> {
    let path = snapshot.path().join(SEAL);
    if !path.exists() {
        return Ok(false);
    }
    let sealed: Seal = serde_json::from_slice(&read(&path, MAX_SEAL)?)
        .map_err(|e| SnapshotError::damaged(&path, e))?;
    let now = make(snapshot)?;
    for (name, hash) in &now.files {
        if sealed.files.get(name) != Some(hash) {
            let path = snapshot.path().join(name);
            return Err(SnapshotError::Changed { path, chunk: 0 });
        }
    }
    for (name, hashes) in &now.chunks {
        let known = sealed.chunks.get(name);
        for (&chunk, hash) in hashes {
            if known.and_then(|k| k.get(&chunk)) != Some(hash) {
                let path = snapshot.path().join(name);
                return Err(SnapshotError::Changed { path, chunk });
            }
        }
    }
    Ok(sealed == now)
}
