//! Tests that cannot run on a machine, which scripts/test counts.

use std::fs::File;
use std::io::Write;

/// Says that a test cannot run here.
pub fn skip(test: &str, reason: &str) {
    eprintln!("skipped {test}: {reason}");
    if let Some(log) = std::env::var_os("JIFFY_SKIP_LOG") {
        let mut log = File::options().append(true).open(log).unwrap();
        writeln!(log, "{test}: {reason}").unwrap();
    }
}
