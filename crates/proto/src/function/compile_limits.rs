//! Limits of one compilation of a WebAssembly module.

use std::time::Duration;

/// Limits of one compilation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompileLimits {
    /// CPU time of all threads together in seconds.
    pub cpu_s: u64,
    /// Address space of the compiler in bytes.
    pub memory_bytes: u64,
    /// Time after which the compiler is killed.
    pub time: Duration,
}

impl Default for CompileLimits {
    fn default() -> Self {
        Self {
            cpu_s: 60,
            memory_bytes: 1 << 30,
            time: Duration::from_secs(60),
        }
    }
}
