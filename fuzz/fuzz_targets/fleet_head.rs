#![no_main]
//! Decrypted but hostile heads of sandboxes: a decoded head is within the limits, is equal after
//! encoding, and has a successor unless its revision is the maximum. The *head* of a sandbox is the
//! record that decides which host of a fleet may run the sandbox.

use jiffy_fleet_core::record::{Head, HeadState};
use jiffy_fleet_core::{MAX_REVISION, MemberId, SandboxId};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let id = SandboxId::try_from("aaaaaaaaaaaaaaaaaaab").unwrap();
    let Ok(head) = Head::decode(data, id) else {
        return;
    };
    assert!((1..=MAX_REVISION).contains(&head.revision.0));
    assert_eq!(Head::decode(&head.encode().unwrap(), id), Ok(head.clone()));
    let successor = head.successor(MemberId(2), head.state());
    assert_eq!(successor.is_none(), head.revision.0 == MAX_REVISION);
    assert!(!matches!(head.state(), HeadState::Running(owner) if owner.epoch.0 == 0));
});
