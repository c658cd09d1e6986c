#![no_main]
//! Decrypted but hostile root records: a decoded record assigns each slot to one shard, and is
//! equal after encoding.
//!
//! The *root record* has the settings of a fleet. A *shard* is a part of the fleet's sandboxes. A
//! *slot* is the first 10 bits of a sandbox's id, which select its shard.

use jiffy_fleet_core::SandboxId;
use jiffy_fleet_core::record::Root;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(root) = Root::decode(data, None) else {
        return;
    };
    // The first characters of an id select its slot: these ids have the first, a middle and the
    // last one.
    for id in [
        "aaaaaaaaaaaaaaaaaaaa",
        "mmaaaaaaaaaaaaaaaaaa",
        "99aaaaaaaaaaaaaaaaaa",
    ] {
        let slot = SandboxId::try_from(id).unwrap().slot();
        assert!(root.shard_of(slot).is_some());
    }
    assert_eq!(Root::decode(&root.encode().unwrap(), None), Ok(root));
});
