#![no_main]
//! Components before compilation: merging of their core modules and data segments. A valid
//! component is valid after merging. Invalid components must not cause a panic.

use jiffy_component_merge::{Limits, merge_core_modules, merge_data_segments};
use libfuzzer_sys::fuzz_target;
use wasmparser::Validator;

/// Limits of a merged module.
const LIMITS: Limits = Limits {
    memories: 1,
    tables: 4,
    instance_bytes: 1 << 20,
};

fuzz_target!(|data: &[u8]| {
    let merged = merge_core_modules(data, &LIMITS);
    let outputs = merged.as_deref().into_iter().chain([data]);
    let outputs: Vec<_> = outputs.map(merge_data_segments).collect();
    if Validator::new().validate_all(data).is_err() {
        return;
    }
    for output in merged
        .as_deref()
        .into_iter()
        .chain(outputs.iter().map(AsRef::as_ref))
    {
        if let Err(error) = Validator::new().validate_all(output) {
            panic!("a valid binary became invalid: {error}");
        }
    }
});
