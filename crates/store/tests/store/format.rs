//! Formats: golden files remain readable, and changed files are rejected.
//!
//! A *golden file* is an object that an earlier version wrote. A *pack* is an object in the store
//! with many compressed and encrypted chunks.

use jiffy_store::envelope::Header;
use jiffy_store::pack::{PackWriter, TRAILER_BYTES, Trailer, decode_frame, encode_frame};
use jiffy_store::{
    Attributes, CHUNK_BYTES, DataKeys, EngineKind, FormatError, Hash, Layer, LayerKind, Location,
    Locations, Run, RunKind, Scope, SnapshotName, StoredManifest,
};
use std::fs;
use std::path::{Path, PathBuf};

const TENANT: [u8; 16] = [7; 16];

fn keys() -> DataKeys {
    DataKeys::derive(3, &[9; 32])
}

fn chunk(fill: u8) -> Vec<u8> {
    vec![fill; CHUNK_BYTES as usize]
}

fn run(kind: RunKind, chunks: u32) -> Run {
    Run { kind, chunks }
}

/// Returns a manifest with two layers and with runs of all kinds.
fn manifest(keys: &DataKeys) -> StoredManifest {
    let memory = Layer {
        kind: LayerKind::Memory,
        name: "memory.layer".into(),
        bytes: 2 << 30,
        runs: vec![
            run(RunKind::Inherited, 5),
            run(RunKind::Stored, 2),
            run(RunKind::Zero, 32_760),
            run(RunKind::Stored, 1),
        ],
        hashes: (1..=3).map(|fill| keys.chunk_hash(&chunk(fill))).collect(),
    };
    let state = Layer {
        kind: LayerKind::DeviceState,
        name: "state.bin".into(),
        bytes: 5,
        runs: vec![run(RunKind::Stored, 1)],
        hashes: vec![keys.chunk_hash(b"state")],
    };
    StoredManifest {
        engine: EngineKind::Microvm,
        created_ms: 1_790_000_000_000,
        attributes: Attributes {
            id: "a1".into(),
            template: "base".into(),
            processor_level: "x86-64-v3".into(),
            ..Attributes::default()
        },
        lineage: vec![SnapshotName {
            scope: Scope::Shared,
            root: Hash([5; 32]),
        }],
        parts: vec![memory, state],
        working_set: vec![6, 5],
    }
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

/// Returns a pack of three chunks and its locations.
fn pack(keys: &DataKeys) -> (Vec<u8>, Locations) {
    let mut writer = PackWriter::with_id(keys, TENANT, [4; 16]);
    for content in [chunk(1), chunk(2), b"state".to_vec()] {
        let hash = keys.chunk_hash(&content);
        let frame = encode_frame(keys, &hash, &content).unwrap();
        writer.push(hash, &frame, content.len()).unwrap();
    }
    let (bytes, entries) = writer.finish(keys).unwrap();
    let locations = entries.iter().map(|entry| Location {
        pack: [4; 16],
        offset: entry.offset,
        length: entry.length,
    });
    (bytes.to_vec(), Locations(locations.collect()))
}

/// Reads and verifies all chunks of a pack.
fn read_pack(keys: &DataKeys, bytes: &[u8]) -> Result<Vec<Vec<u8>>, FormatError> {
    let header = Header::decode(*b"JIFFYPAK", bytes)?;
    let end = bytes.len().saturating_sub(TRAILER_BYTES);
    let trailer = Trailer::decode(&bytes[end..], bytes.len() as u64)?;
    let entries = trailer.open(keys, &header, &bytes[trailer.offset as usize..end])?;
    let frames = entries.iter().map(|entry| {
        let at = entry.offset as usize;
        decode_frame(keys, &entry.hash, &bytes[at..at + entry.length as usize])
    });
    frames.collect()
}

/// Writes the golden files: `cargo test -p jiffy-store --test store format:: -- --ignored`.
#[test]
#[ignore = "writes files that are to stay as they are"]
fn write_goldens() {
    let keys = keys();
    let (root, object) = manifest(&keys).encode(&keys, TENANT).unwrap();
    let (bytes, locations) = pack(&keys);
    fs::create_dir_all(data("")).unwrap();
    fs::write(data("manifest1.bin"), object).unwrap();
    fs::write(data("manifest1.root"), format!("{root}\n")).unwrap();
    fs::write(data("pack1.bin"), bytes).unwrap();
    let locations = locations.encode(&keys, TENANT, root).unwrap();
    fs::write(data("locations1.bin"), locations).unwrap();
}

#[test]
fn golden_files_of_version_1_keep_loading() {
    let keys = keys();
    let root: Hash = fs::read_to_string(data("manifest1.root"))
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let object = fs::read(data("manifest1.bin")).unwrap();
    let found = StoredManifest::decode(&object, &keys, root).unwrap();
    assert_eq!(found, manifest(&keys));
    assert_eq!(found.root(&keys).unwrap(), root);
    let chunks = read_pack(&keys, &fs::read(data("pack1.bin")).unwrap()).unwrap();
    assert_eq!(chunks, [chunk(1), chunk(2), b"state".to_vec()]);
    let object = fs::read(data("locations1.bin")).unwrap();
    let locations = Locations::decode(&object, &keys, root).unwrap();
    assert_eq!(locations.0.len(), 3);
    assert_eq!(locations.packs().collect::<Vec<_>>(), [[4; 16]]);
}

#[test]
fn a_flipped_bit_anywhere_in_a_golden_file_is_found() {
    let keys = keys();
    let root: Hash = fs::read_to_string(data("manifest1.root"))
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let flips = |name: &str, step: usize| {
        let bytes = fs::read(data(name)).unwrap();
        let changed = (0..bytes.len()).step_by(step).map(move |at| {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << (at % 8);
            changed
        });
        changed.collect::<Vec<_>>()
    };
    for changed in flips("manifest1.bin", 1) {
        assert!(StoredManifest::decode(&changed, &keys, root).is_err());
    }
    for changed in flips("locations1.bin", 1) {
        assert!(Locations::decode(&changed, &keys, root).is_err());
    }
    for changed in flips("pack1.bin", 1) {
        assert!(read_pack(&keys, &changed).is_err());
    }
}

#[test]
fn truncated_objects_and_other_versions_are_rejected_with_a_reason() {
    let keys = keys();
    let root: Hash = fs::read_to_string(data("manifest1.root"))
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let bytes = fs::read(data("manifest1.bin")).unwrap();
    for length in 0..bytes.len() {
        assert!(StoredManifest::decode(&bytes[..length], &keys, root).is_err());
    }
    let mut newer = bytes.clone();
    // Byte 8 is the version.
    newer[8] = 2;
    let refused = StoredManifest::decode(&newer, &keys, root).unwrap_err();
    assert_eq!(refused, FormatError::Version { found: 2, read: 1 });
    let other = StoredManifest::decode(&bytes, &keys, Hash([1; 32])).unwrap_err();
    assert!(other.to_string().contains("another snapshot"), "{other}");
}

#[test]
fn keys_of_another_generation_open_nothing_and_hash_differently() {
    let (ours, other) = (keys(), DataKeys::derive(3, &[8; 32]));
    assert_ne!(ours.chunk_hash(b"x"), other.chunk_hash(b"x"));
    let (root, object) = manifest(&ours).encode(&ours, TENANT).unwrap();
    assert!(StoredManifest::decode(&object, &other, root).is_err());
}

#[test]
fn contradictory_manifests_are_not_written() {
    let keys = keys();
    let refused = |change: fn(&mut StoredManifest)| {
        let mut manifest = manifest(&keys);
        change(&mut manifest);
        manifest.encode(&keys, TENANT).unwrap_err()
    };
    refused(|m| m.parts[0].hashes.truncate(2));
    refused(|m| m.parts[0].bytes += 1);
    refused(|m| m.parts[0].name = "../x".into());
    refused(|m| m.parts[1].name = "memory.layer".into());
    refused(|m| m.parts[0].runs[0].chunks = 0);
}

#[test]
fn zero_and_inherited_runs_cost_no_hash_and_no_chunk() {
    let manifest = manifest(&keys());
    let stored: Vec<u64> = manifest.parts[0]
        .stored()
        .map(|(number, _)| number)
        .collect();
    assert_eq!(stored, [5, 6, 32_767]);
}
