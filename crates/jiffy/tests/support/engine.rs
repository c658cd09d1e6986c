//! Tests that are run on more than one engine.

use super::programs;
use jiffy_engine_api::GVISOR;
use std::cell::RefCell;

thread_local! {
    static TEST_ENGINE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The engine of this thread's sandboxes; none: what suits this machine.
pub fn wanted() -> Option<String> {
    let told = TEST_ENGINE.with_borrow(Clone::clone);
    told.or_else(|| std::env::var("JIFFY_ENGINE").ok())
}

/// From here on the sandboxes of this thread are on `engine`.
pub fn want(engine: Option<String>) {
    TEST_ENGINE.set(engine);
}

/// True if sandboxes are on gVisor.
pub fn is_gvisor() -> bool {
    wanted().is_some_and(|engine| engine == GVISOR)
}

/// Returns the reason why sandboxes are not possible here, or `None`.
pub fn missing() -> Option<String> {
    if is_gvisor() {
        missing_gvisor()
    } else {
        Some(jiffy_microvm_engine::host_kvm::open().err()?.to_string())
    }
}

/// Returns the reason why sandboxes on gVisor are not possible here, or `None`.
pub fn missing_gvisor() -> Option<String> {
    match (
        nix::unistd::geteuid().is_root(),
        programs().join("jiffy-gvisor").exists(),
    ) {
        (false, _) => Some("gVisor needs root".to_owned()),
        (true, false) => Some("jiffy-gvisor was not built: there was no Go".to_owned()),
        (true, true) => None,
    }
}
