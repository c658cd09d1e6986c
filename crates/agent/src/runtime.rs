//! Thread of the event loop. Calls that may wait for a file system are made by
//! [`workers`](crate::workers).

use std::io;

/// Runs a future, and all tasks that it spawns locally, until the future completes.
pub fn block_on<T>(future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()?;
    tokio::task::LocalSet::new().block_on(&runtime, future)
}
