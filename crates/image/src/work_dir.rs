//! Working directories of builds, and the safe removal of directory trees.

use crate::file::{FileError, OnPath};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Working directory of a build, removed on drop.
pub(crate) struct WorkDir(pub PathBuf);

impl WorkDir {
    /// Creates the directory. The caller must hold the template's lock, so an existing directory
    /// was left by a build that was killed.
    pub(crate) fn create(path: PathBuf) -> Result<Self, FileError> {
        remove_tree(&path)?;
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .on("create", &path)?;
        Ok(Self(path))
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        // Ignore the error: the next build removes the remains.
        let _ = remove_tree(&self.0);
    }
}

/// Removes a directory tree if it exists. Returns an error if a file system is mounted in it,
/// because the removal would delete the files of that file system as well.
pub(crate) fn remove_tree(path: &Path) -> Result<(), FileError> {
    let mounts =
        fs::read_to_string("/proc/self/mountinfo").on("read", Path::new("/proc/self/mountinfo"))?;
    let mounted = mounts
        .lines()
        // The fifth field of a line is the mount point (proc_pid_mountinfo(5)).
        .filter_map(|line| line.split(' ').nth(4))
        .find(|point| Path::new(point).starts_with(path));
    if let Some(point) = mounted {
        let busy = io::Error::new(
            io::ErrorKind::ResourceBusy,
            "a file system is mounted below it: unmount the file system and run again",
        );
        return Err(busy).on("remove", Path::new(point));
    }
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).on("remove", path),
        _ => Ok(()),
    }
}
