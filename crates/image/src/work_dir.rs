//! Working directories of builds, and the safe removal of directory trees.

use crate::file::{FileError, OnPath};
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::OsStringExt;
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
    // Mount points are absolute paths without symbolic links.
    let absolute = match fs::canonicalize(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.on("examine", path)?,
    };
    let mounts = fs::read("/proc/thread-self/mountinfo")
        .on("read", Path::new("/proc/thread-self/mountinfo"))?;
    let mounted = mounts
        .split(|byte| *byte == b'\n')
        // The fifth field of a line is the mount point (proc_pid_mountinfo(5)).
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(unescaped)
        .find(|point| point.starts_with(&absolute));
    if let Some(point) = mounted {
        let busy = io::Error::new(
            io::ErrorKind::ResourceBusy,
            "a file system is mounted below it: unmount the file system and run again",
        );
        return Err(busy).on("remove", &point);
    }
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).on("remove", path),
        _ => Ok(()),
    }
}

/// Decodes a path of `/proc/thread-self/mountinfo`, in which the kernel writes spaces, tabs,
/// newlines and backslashes as a backslash and three octal digits.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| first == b'\\');
        let byte = octal
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(byte.unwrap_or(first));
        rest = byte.and_then(|_| after.get(3..)).unwrap_or(after);
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn mount_points_with_spaces_are_decoded() {
        let decoded = |text: &str| unescaped(text.as_bytes());
        assert_eq!(decoded(r"/a\040b/c\011\134d"), Path::new("/a b/c\t\\d"));
        // Not an escape of the kernel.
        assert_eq!(decoded(r"/a\9\"), Path::new(r"/a\9\"));
    }

    #[test]
    fn a_tree_with_a_mount_is_not_removed_even_if_its_path_has_a_space() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("a tree");
        let point = tree.join("mount");
        fs::create_dir_all(&point).unwrap();
        // The mount is visible in this namespace only, which ends with the thread.
        let refused = std::thread::scope(|scope| {
            let work = scope.spawn(|| {
                let flags = nix::sched::CloneFlags::CLONE_NEWNS | nix::sched::CloneFlags::CLONE_FS;
                nix::sched::unshare(flags).ok()?;
                let none: Option<&str> = None;
                let private = nix::mount::MsFlags::MS_PRIVATE | nix::mount::MsFlags::MS_REC;
                nix::mount::mount(none, "/", none, private, none).ok()?;
                let tmpfs = Some("tmpfs");
                nix::mount::mount(tmpfs, &point, tmpfs, nix::mount::MsFlags::empty(), none).ok()?;
                fs::write(point.join("file"), "").unwrap();
                let refused = remove_tree(&tree).is_err();
                assert!(point.join("file").exists());
                Some(refused)
            });
            work.join().unwrap()
        });
        // `None` without root.
        assert!(refused.unwrap_or(true));
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
    }
}
