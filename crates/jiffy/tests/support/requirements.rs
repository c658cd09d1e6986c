//! Requirements of tests, and the test that runs on the current thread.

use super::{engine, lab};
use std::cell::Cell;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

thread_local! {
    static TEST_NAME: Cell<&'static str> = const { Cell::new("") };
}

/// Requirements of a test, as stated by `#[jiffy_test]`.
pub struct Requirements {
    /// Path of the test, which starts with the name of the program.
    pub test: &'static str,
    /// Name of an engine, or "default", or "none" if the test starts no guest.
    pub engine: &'static str,
    /// Stock template of its guests.
    pub template: &'static str,
    pub root: bool,
    /// Network namespaces, which require root.
    pub lab: bool,
}

impl Requirements {
    /// Runs a test. Skips the test if a requirement is not met.
    pub fn run(&self, test: impl FnOnce()) {
        set_test_name(
            self.test
                .split_once("::")
                .map_or(self.test, |parts| parts.1),
        );
        if !["default", "none"].contains(&self.engine) {
            engine::want(Some(self.engine.to_owned()));
        }
        match self.unmet_requirement() {
            Some(reason) => skip(&reason),
            None => test(),
        }
        engine::want(None);
    }

    fn unmet_requirement(&self) -> Option<String> {
        if self.root && !nix::unistd::geteuid().is_root() {
            return Some("needs root".to_owned());
        }
        if let Some(reason) = self.lab.then(lab::missing).flatten() {
            return Some(reason);
        }
        if self.engine == "none" {
            return None;
        }
        engine::missing().or_else(|| {
            let template = home().join("templates").join(self.template);
            (!template.exists()).then(|| format!("template {} is not built", self.template))
        })
    }
}

/// Data directory with the templates of tests.
pub fn home() -> PathBuf {
    let default = || PathBuf::from("/var/lib/jiffy");
    std::env::var_os("JIFFY_HOME").map_or_else(default, PathBuf::from)
}

/// Returns the name of this thread's test, without the name of the program.
pub fn test_name() -> &'static str {
    TEST_NAME.get()
}

/// Assigns this thread to the test `name`.
pub fn set_test_name(name: &'static str) {
    TEST_NAME.set(name);
}

/// Records the test of this thread as skipped.
pub fn skip(reason: &str) {
    let test = test_name();
    assert!(
        !test.is_empty(),
        "a test that may be skipped has the attribute jiffy_test"
    );
    eprintln!("SKIPPED {test}: {reason}");
    if let Some(log) = std::env::var_os("JIFFY_SKIP_LOG") {
        let mut log = OpenOptions::new()
            .append(true)
            .create(true)
            .open(log)
            .unwrap();
        writeln!(log, "{test}: {reason}").unwrap();
    }
}

/// Runs an async test to completion.
pub fn block_on(test: impl Future<Output = ()>) {
    tokio::runtime::Runtime::new().unwrap().block_on(test);
}
