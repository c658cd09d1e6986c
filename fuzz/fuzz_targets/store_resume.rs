#![no_main]
//! Decrypted but hostile resume bundles: a decoded bundle is within the limits and is encoded to
//! the same content. A *resume bundle* is one object with everything that a host reads first to
//! resume a snapshot of another host.

use jiffy_store::{DataKeys, Hash, MAX_BUNDLED_BYTES, ResumeBundle};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static KEYS: LazyLock<DataKeys> = LazyLock::new(|| DataKeys::derive(1, &[1; 32]));

fuzz_target!(|data: &[u8]| {
    let Ok(bundle) = ResumeBundle::decode_body(&data.to_vec().into()) else {
        return;
    };
    let frames = bundle.chunks.iter().map(|chunk| chunk.frame.len());
    assert!(frames.sum::<usize>() <= MAX_BUNDLED_BYTES);
    let snapshots = bundle.snapshots.len();
    assert!(
        bundle
            .chunks
            .iter()
            .all(|chunk| (chunk.snapshot as usize) < snapshots)
    );
    let root = Hash([2; 32]);
    let object = bundle.encode(&KEYS, [0; 16], root).unwrap();
    let decoded = ResumeBundle::decode(&object, &KEYS, [0; 16], root).unwrap();
    assert_eq!(decoded, bundle);
});
