//! Tests that run on several engines.

use super::programs;
use jiffy_engine_api::GVISOR;
use std::cell::RefCell;

thread_local! {
    static TEST_ENGINE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Returns the engine of this thread's sandboxes. `None` for the default engine of this machine.
pub fn wanted() -> Option<String> {
    let engine = TEST_ENGINE.with_borrow(Clone::clone);
    engine.or_else(|| std::env::var("JIFFY_ENGINE").ok())
}

/// Selects the engine of this thread's sandboxes.
pub fn want(engine: Option<String>) {
    TEST_ENGINE.set(engine);
}

/// Returns whether sandboxes use gVisor.
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
        (false, _) => Some("gVisor requires root".to_owned()),
        (true, false) => Some("jiffy-gvisor was not built: Go was not installed".to_owned()),
        (true, true) => None,
    }
}
