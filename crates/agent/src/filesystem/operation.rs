//! Creation and removal of directories on behalf of a user.

use super::remove_tree::remove_tree;
use crate::sys;
use crate::users::User;
use crate::workers::Progress;
use std::io;
use std::path::Path;

/// Creates a directory and missing parents. The user owns the new directories.
pub fn make_dirs(path: &Path, user: &User) -> io::Result<()> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => return Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
        Err(_) => {}
    }
    if let Some(parent) = path.parent() {
        make_dirs(parent, user)?;
    }
    // Another process may create the directory at the same time.
    match std::fs::create_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => return Ok(()),
        other => other?,
    }
    // Without privileges, the directory belongs to the agent's user.
    match sys::chown(path, user.uid, user.gid) {
        Err(e) if e.raw_os_error() != Some(libc::EPERM) => Err(e),
        _ => Ok(()),
    }
}

/// Removes a file, or a directory with its contents. A missing file is not an error.
pub fn remove(path: &Path, progress: &Progress) -> io::Result<()> {
    let result = match std::fs::symlink_metadata(path) {
        // A symbolic link to a directory is not a directory here: only the link is removed.
        Ok(found) if found.is_dir() => remove_tree(path, progress),
        Ok(_) => std::fs::remove_file(path),
        Err(e) => Err(e),
    };
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
