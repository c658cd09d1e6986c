#![no_main]
//! Decrypted but hostile manifests of snapshots: a decoded manifest is within the limits and is
//! encoded to the same bytes.

use jiffy_store::{DataKeys, StoredManifest};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

/// Keys with which manifests are encrypted.
static KEYS: LazyLock<DataKeys> = LazyLock::new(|| DataKeys::derive(1, &[1; 32]));

fuzz_target!(|data: &[u8]| {
    let Ok(manifest) = StoredManifest::decode_body(data) else {
        return;
    };
    for part in &manifest.parts {
        assert!(part.stored().all(|(number, _)| number < part.chunks()));
        assert_eq!(part.stored().count(), part.hashes.len());
    }
    let (root, object) = manifest.encode(&KEYS, [0; 16]).unwrap();
    assert_eq!(
        StoredManifest::decode(&object, &KEYS, root).unwrap(),
        manifest
    );
});
