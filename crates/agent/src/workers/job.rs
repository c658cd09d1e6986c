//! Records of calls that are queued or running on worker threads.
//!
//! A call on a file system that does not answer blocks its thread. The records show which threads
//! are stuck.

use super::{CallClass, CallError, MAX_STUCK_PER_FILE_SYSTEM, Pool, lock, mount_table};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Value of [`JobRecord::progress_ms`] for a call that is queued.
pub const NOT_STARTED: u64 = u64::MAX;
/// Value of [`JobRecord::progress_ms`] for a call that waits for its client, which may take any
/// time.
pub const SUSPENDED: u64 = u64::MAX - 1;

/// A queued or running call.
pub struct JobRecord {
    /// Class of the call.
    pub class: CallClass,
    /// Time without progress after which the call counts as stuck.
    pub patience: Duration,
    /// Operation and its object, for errors.
    pub what: String,
    /// Path that the call works on, once it is resolved.
    pub path: Mutex<Option<PathBuf>>,
    /// Time of the last progress in milliseconds since the pool's epoch (its start), or
    /// [`NOT_STARTED`] or [`SUSPENDED`].
    pub progress_ms: AtomicU64,
}

impl JobRecord {
    /// Returns whether the call made no progress for longer than its patience.
    pub fn is_stuck(&self, now_ms: u64) -> bool {
        let progress = self.progress_ms.load(Ordering::Relaxed);
        let quiet = Duration::from_millis(now_ms.saturating_sub(progress));
        // The special values are at least `SUSPENDED`: queued and suspended calls are not stuck.
        progress < SUSPENDED && quiet >= self.patience
    }
}

/// Progress of a running call.
#[derive(Clone)]
pub struct Progress {
    pub(super) pool: Arc<Pool>,
    pub(super) record: Arc<JobRecord>,
}

impl Progress {
    /// Records that a step was completed. Calls with many steps must call this function after each
    /// step.
    pub fn advance(&self) {
        let now = self.pool.now_ms();
        self.record.progress_ms.store(now, Ordering::Relaxed);
    }

    /// Calls `wait`, which waits for the client and not for a file system.
    pub fn wait_for_client<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.record.progress_ms.store(SUSPENDED, Ordering::Relaxed);
        let result = wait();
        self.advance();
        result
    }

    /// Records the path that the call accesses.
    ///
    /// # Errors
    /// Too many calls on the file system of `path` are stuck.
    pub fn enter(&self, path: &Path) -> Result<(), CallError> {
        let stuck = self.pool.stuck_paths();
        // The mount table is read only if enough calls are stuck, because the read is expensive.
        if stuck.len() >= MAX_STUCK_PER_FILE_SYSTEM {
            let mounts = mount_table::mount_points();
            let place = mount_table::place(&mounts, path);
            let is_here = |other: &&PathBuf| mount_table::place(&mounts, other) == place;
            if stuck.iter().filter(is_here).count() >= MAX_STUCK_PER_FILE_SYSTEM {
                return Err(CallError::Unresponsive {
                    path: place.to_path_buf(),
                });
            }
        }
        *lock(&self.record.path) = Some(path.to_path_buf());
        self.advance();
        Ok(())
    }
}
