//! Telling an out-of-memory kill from any other SIGKILL.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Maximum number of bytes that are read of the kernel's counters.
const MAX_COUNTER_BYTES: usize = 64 * 1024;

/// Follows the kernel's count of out-of-memory kills.
#[derive(Debug)]
pub struct OomWatch {
    /// The kernel's counters. Open from the start, so that no later mount can take their place.
    counters: Option<File>,
    seen: Cell<u64>,
}

impl OomWatch {
    /// Starts from the present count.
    pub fn new() -> Self {
        let counters = File::open("/proc/vmstat").ok();
        let seen = Cell::new(count(counters.as_ref()));
        Self { counters, seen }
    }

    /// Returns true if the kernel killed for memory since the last call.
    pub fn happened(&self) -> bool {
        let now = count(self.counters.as_ref());
        // gVisor's count restarts with a restore.
        self.seen.replace(now) != now && now > 0
    }
}

impl Default for OomWatch {
    fn default() -> Self {
        Self::new()
    }
}

fn count(counters: Option<&File>) -> u64 {
    let mut text = Vec::with_capacity(8 * 1024);
    if let Some(counters) = counters {
        let mut chunk = [0; 4096];
        while text.len() < MAX_COUNTER_BYTES {
            match counters.read_at(&mut chunk, text.len() as u64) {
                Ok(n) if n > 0 => text.extend_from_slice(&chunk[..n]),
                _ => break,
            }
        }
    }
    let text = String::from_utf8_lossy(&text);
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        .unwrap_or(0)
}
