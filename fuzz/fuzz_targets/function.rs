#![no_main]
//! Modules of functions: compilation, and the header of compiled files.

use jiffy_function_runtime::artifact;
use jiffy_function_runtime::compile::compile;
use jiffy_function_runtime::engine;
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use wasmtime::Engine;

/// Maximum size in bytes. Larger modules take long to compile and reach no further code.
const MAX_MODULE_BYTES: usize = 16 << 10;

static ENGINE: LazyLock<Engine> = LazyLock::new(|| engine::compiling().expect("an engine"));

fuzz_target!(|data: &[u8]| {
    if let Ok((header, code)) = artifact::parse(data) {
        assert_eq!(artifact::encode(&header, code), data);
    }
    if data.len() > MAX_MODULE_BYTES {
        return;
    }
    if let Ok(file) = compile(&ENGINE, data, "owner") {
        let digest = *blake3::hash(&file).as_bytes();
        let fingerprint = engine::fingerprint(&ENGINE);
        let owner = artifact::owner_digest("owner");
        artifact::check(&file, &digest, &fingerprint, &owner).expect("its own file");
        assert!(artifact::check(&file, &digest, &fingerprint, &[0; 32]).is_err());
    }
});
