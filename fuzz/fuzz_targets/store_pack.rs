#![no_main]
//! Indexes, trailers and frames of packs: for any index, frames are contiguous and within their
//! pack.
//!
//! A *pack* is an object in the store with many chunks. A *frame* is one of these chunks,
//! compressed and encrypted. The *trailer* at the end of a pack has the position of its index.

use jiffy_store::pack::{Trailer, decode_frame, decode_index};
use jiffy_store::{DataKeys, Hash};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static KEYS: LazyLock<DataKeys> = LazyLock::new(|| DataKeys::derive(1, &[1; 32]));

fuzz_target!(|data: &[u8]| {
    // The first four bytes are the end of the frames in the pack.
    let Some((end, index)) = data.split_first_chunk() else {
        return;
    };
    let end = u64::from(u32::from_le_bytes(*end));
    if let Ok(entries) = decode_index(index, end) {
        let ends = entries
            .iter()
            .map(|entry| u64::from(entry.offset) + u64::from(entry.length));
        assert!(ends.max().is_none_or(|last| last == end));
    }
    let _ = Trailer::decode(index, end);
    assert!(decode_frame(&KEYS, &Hash([0; 32]), data).is_err());
});
