//! Open directory of a snapshot. Its files are opened relative to the directory, so a merge, a fold
//! or an import that replaces the directory at the path has no effect.
//!
//! A *merge* copies the layers of ancestors into a snapshot. A *fold* copies the layers of a parent
//! into its only child.

use crate::SnapshotError;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::linkat;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Open directory, and the path by which it was opened.
pub(crate) struct SnapshotDir<'a> {
    dir: File,
    name: &'a Path,
}

impl<'a> SnapshotDir<'a> {
    /// Opens the directory at `name`.
    pub fn at(name: &'a Path) -> Result<Self, SnapshotError> {
        let dir = File::open(name).map_err(SnapshotError::io(name))?;
        Ok(Self { dir, name })
    }

    /// Returns the path of a file in the directory, for messages.
    pub fn path(&self, file: &str) -> PathBuf {
        self.name.join(file)
    }

    /// Returns whether the path still refers to the directory: it was neither removed nor replaced
    /// by a merge, a fold or an import.
    pub fn is_still_named(&self) -> bool {
        match (fs::metadata(self.name), self.dir.metadata()) {
            (Ok(named), Ok(ours)) => (named.dev(), named.ino()) == (ours.dev(), ours.ino()),
            _ => false,
        }
    }

    /// Opens a file for reading. `None` if the file does not exist.
    pub fn find(&self, file: &str) -> Result<Option<File>, SnapshotError> {
        // O_NOFOLLOW: the files of an imported snapshot are untrusted.
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
        match openat(&self.dir, file, flags, Mode::empty()) {
            Ok(file) => Ok(Some(file.into())),
            Err(Errno::ENOENT) => Ok(None),
            Err(e) => Err(SnapshotError::io(&self.path(file))(e.into())),
        }
    }

    /// Opens a file that must exist.
    pub fn open(&self, file: &str) -> Result<File, SnapshotError> {
        let missing = || SnapshotError::io(&self.path(file))(Errno::ENOENT.into());
        self.find(file)?.ok_or_else(missing)
    }

    /// Reads a file of at most `limit` bytes.
    pub fn read(&self, file: &str, limit: u64) -> Result<Vec<u8>, SnapshotError> {
        let path = self.path(file);
        let mut bytes = Vec::new();
        let opened = self.open(file)?;
        // One byte more than the limit, to detect a longer file.
        let read = opened.take(limit + 1).read_to_end(&mut bytes);
        match read.map_err(SnapshotError::io(&path))? {
            n if n as u64 <= limit => Ok(bytes),
            _ => Err(SnapshotError::damaged(&path, "it is too long")),
        }
    }

    /// Creates a complete file atomically. An existing file of this name is not changed.
    pub fn create_once(&self, file: &str, bytes: &[u8]) -> Result<(), SnapshotError> {
        let create = || -> std::io::Result<()> {
            // Write an unnamed file first: the name never refers to an incomplete file.
            let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
            let mut new = File::from(openat(
                &self.dir,
                ".",
                flags,
                Mode::S_IRUSR | Mode::S_IWUSR,
            )?);
            new.write_all(bytes)?;
            let link = format!("/proc/self/fd/{}", new.as_raw_fd());
            let follow = AtFlags::AT_SYMLINK_FOLLOW;
            match linkat(AT_FDCWD, Path::new(&link), &self.dir, file, follow) {
                // Another process or thread has created the file first.
                Ok(()) | Err(Errno::EEXIST) => Ok(()),
                Err(e) => Err(e.into()),
            }
        };
        create().map_err(SnapshotError::io(&self.path(file)))
    }
}
