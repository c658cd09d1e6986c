#![no_main]
//! Locations of chunks: each is within the maximum size of a listed pack. A *pack* is an object in
//! the store with many compressed and encrypted chunks.

use jiffy_store::Locations;
use jiffy_store::pack::MAX_PACK_BYTES;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(locations) = Locations::decode_body(data) else {
        return;
    };
    for location in &locations.0 {
        assert!(u64::from(location.offset) + u64::from(location.length) <= MAX_PACK_BYTES);
    }
});
