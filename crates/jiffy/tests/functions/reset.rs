//! Tests for the reset of functions' memory, which a daemon selects at its start, also for
//! processes of an earlier daemon.
//!
//! A *slot* is address space for the memory of one instance, which requests use one after the
//! other. The *reset* cleans a slot after a request: `strict` clears or releases all pages, and
//! `fast` restores only the pages that the request wrote.

use super::FunctionDaemon;
use crate::support::{Done, finish, programs, skip};
use jiffy_test_attributes::jiffy_test;
use std::process::{Command, Stdio};

/// Module that searches for marks of earlier requests.
const MARKS: &[u8] = include_bytes!("../../../function-runtime/tests/guests/marks.wat");

fn command_line(process: u32) -> String {
    let words = std::fs::read(format!("/proc/{process}/cmdline")).unwrap();
    String::from_utf8(words).unwrap()
}

/// Tests that a restarted daemon replaces processes that use another reset.
pub fn reset_is_reported_and_applied(daemon: &FunctionDaemon) {
    let home = &daemon.remote.test_home;
    let path = daemon.module(&wat::parse_bytes(MARKS).unwrap());
    home.ok(&["function", "deploy", "marks", path.to_str().unwrap()]);
    let invoke = || home.ok(&["function", "invoke", "marks"]);
    assert_eq!(invoke(), "clean");
    let strict = daemon.processes();
    assert!(
        strict
            .iter()
            .all(|id| command_line(*id).contains("--reset\0strict\0"))
    );

    let restart = ["daemon", "restart", "--listen", "127.0.0.1:0"];
    home.ok(&[&restart[..], &["--functions-reset", "fast"]].concat());
    assert_eq!(
        daemon.processes(),
        [0; 0],
        "the process with another reset was stopped"
    );
    for _ in 0..3 {
        assert_eq!(invoke(), "clean");
    }
    let [fast] = daemon.processes()[..] else {
        panic!("{:?}", daemon.processes());
    };
    assert!(
        command_line(fast).contains("--reset\0fast\0"),
        "{}",
        command_line(fast)
    );
    let info = home.json(&["function", "info", "marks"]);
    // One request before the restart, and three after it.
    assert_eq!(info["metrics"]["requests"], 4, "{info}");
}

/// Runs `jiffy serve` with the reset `fast` on a simulated kernel before 6.7. `None` if mount
/// namespaces are not permitted.
fn serve_without_page_scans(home: &std::path::Path) -> Option<Done> {
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "sh", "-c", script])
            .env("JIFFY", programs().join("jiffy"))
            .env("JIFFY_HOME", home)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    };
    // Since Linux 6.7, this file offers page scans, which the reset `fast` requires.
    let hide = "mount --bind /dev/null /proc/$$/pagemap";
    let allowed = unshare(hide).status().is_ok_and(|status| status.success());
    let serve = format!("{hide} && exec \"$JIFFY\" serve --no-listen --functions-reset fast");
    allowed.then(|| finish(unshare(&serve).spawn().unwrap()))
}

#[jiffy_test]
fn the_reset_fast_is_rejected_on_a_kernel_without_page_scans() {
    let home = tempfile::tempdir().unwrap();
    let Some(done) = serve_without_page_scans(home.path()) else {
        return skip("mount namespaces are not permitted on this host");
    };
    assert_eq!(done.code, Some(1), "{done:?}");
    for part in ["Linux 6.7", "--functions-reset strict"] {
        assert!(done.stderr.contains(part), "{done:?}");
    }
}
