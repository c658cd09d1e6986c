//! Advisory file locks (`flock`) between threads and processes.

use crate::file::{FileError, OnPath};
use std::fs::{File, OpenOptions, TryLockError};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// A lock. It is held until all descriptors of the lock file are closed: the descriptor in this
/// process and the descriptors that child processes inherited.
///
/// The lock file is never removed: otherwise two holders could lock different files of the same
/// name.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Lock {
    /// Acquires the lock at `path`. Calls `wait` once if the lock is held.
    pub(crate) fn take(path: &Path, wait: impl FnOnce()) -> Result<Self, FileError> {
        let file = open(path)?;
        // The first attempt does not block, so that `wait` is called only if there is a wait.
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                wait();
                file.lock().on("lock", path)?;
            }
            Err(TryLockError::Error(e)) => return Err(e).on("lock", path),
        }
        Ok(Self(file))
    }
}

impl Lock {
    /// Acquires the lock at `path` in shared mode. Waits for an exclusive holder.
    pub(crate) fn share(path: &Path) -> Result<Self, FileError> {
        let file = open(path)?;
        file.lock_shared().on("lock", path)?;
        Ok(Self(file))
    }

    /// Acquires the lock at `path` if it is free.
    pub(crate) fn try_take(path: &Path) -> Result<Option<Self>, FileError> {
        let file = open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(e)) => Err(e).on("lock", path),
        }
    }
}

/// Opens the lock file, and creates it if it is missing.
fn open(path: &Path) -> Result<File, FileError> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .on("open the lock", path)
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
