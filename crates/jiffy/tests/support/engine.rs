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

/// Runs a test on gVisor.
pub fn on_gvisor(test: fn()) {
    want(Some(GVISOR.to_owned()));
    test();
    want(None);
}

/// A test's name, which is that of its engine, too, where it is run on several.
pub fn name_of(test: &str) -> String {
    match TEST_ENGINE.with_borrow(Clone::clone) {
        Some(engine) => format!("{engine}::{test}"),
        None => test.to_owned(),
    }
}

/// Why there can be no sandboxes here; none: there can.
pub fn missing() -> Option<String> {
    match is_gvisor() {
        true if !nix::unistd::geteuid().is_root() => {
            Some("gVisor sandboxes are for root".to_owned())
        }
        true if !programs().join("jiffy-gvisor").exists() => {
            Some("jiffy-gvisor was not built: there was no Go".to_owned())
        }
        true => None,
        false => Some(jiffy_microvm_engine::host_kvm::open().err()?.to_string()),
    }
}

/// The same tests once more, on gVisor. Those that cannot hold there are skipped by name, with the
/// reason.
#[macro_export]
macro_rules! on_gvisor {
    ($($test:ident $(cannot hold: $reason:literal)?,)*) => {
        mod gvisor {
            $( $crate::on_gvisor!(@one $test $($reason)?); )*
        }
    };
    (@one $test:ident) => {
        #[test]
        fn $test() {
            $crate::support::engine::on_gvisor(super::$test);
        }
    };
    (@one $test:ident $reason:literal) => {
        #[test]
        fn $test() {
            $crate::support::engine::on_gvisor(|| {
                $crate::support::skip(stringify!($test), $reason);
            });
        }
    };
}
