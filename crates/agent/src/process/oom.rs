//! Telling an out-of-memory kill from any other SIGKILL.

use std::cell::Cell;

/// Follows the kernel's count of out-of-memory kills.
#[derive(Debug)]
pub struct OomWatch {
    seen: Cell<u64>,
}

impl OomWatch {
    /// Starts from the present count.
    pub fn new() -> Self {
        Self {
            seen: Cell::new(count()),
        }
    }

    /// Returns true if the kernel killed for memory since the last call.
    pub fn happened(&self) -> bool {
        let now = count();
        // gVisor's count restarts with a restore.
        self.seen.replace(now) != now && now > 0
    }
}

impl Default for OomWatch {
    fn default() -> Self {
        Self::new()
    }
}

fn count() -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        .unwrap_or(0)
}
