//! The single thread on which everything runs.

use crate::state::MAX_ARCHIVES;
use std::io;

/// Runs a future, and all it spawns locally, to its end.
pub fn block_on<T>(future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        // Only recursive work on directories leaves the thread, and archives, each of which holds
        // one for long.
        .max_blocking_threads(2 + MAX_ARCHIVES)
        .thread_stack_size(256 * 1024)
        .thread_keep_alive(std::time::Duration::from_secs(1))
        .build()?;
    tokio::task::LocalSet::new().block_on(&runtime, future)
}
