//! Reports tests that cannot run on this machine. scripts/rust-tests counts them in the file
//! JIFFY_SKIP_LOG.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs::File;
use std::io::Write;

/// Reports that a test cannot run on this machine.
pub fn skip(test: &str, reason: &str) {
    eprintln!("skipped {test}: {reason}");
    if let Some(log) = std::env::var_os("JIFFY_SKIP_LOG") {
        let mut log = File::options().append(true).open(log).unwrap();
        writeln!(log, "{test}: {reason}").unwrap();
    }
}
