//! Detects that the lock file with which a daemon owns its data directory was removed or replaced.
//! Garbage collection checks this: it would remove files of another daemon that it does not know.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Lock file of a data directory. The daemon holds the file locked while it owns the directory.
#[derive(Debug)]
pub struct DirectoryLock {
    path: PathBuf,
    /// Device and inode of the locked file.
    identity: (u64, u64),
}

impl DirectoryLock {
    /// Creates the lock of `file`, which the caller has locked and which is at `path`.
    pub fn of(path: &Path, file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self {
            path: path.to_owned(),
            // A file that replaces the lock has another inode.
            identity: (metadata.dev(), metadata.ino()),
        })
    }

    /// Returns `false` once the file was removed or replaced. Another daemon may then own the
    /// directory and have files in it that this daemon does not know.
    pub fn is_in_place(&self) -> bool {
        match fs::metadata(&self.path) {
            Ok(metadata) => (metadata.dev(), metadata.ino()) == self.identity,
            // Any other error, such as a lack of descriptors, does not prove that the file is
            // missing.
            Err(e) => !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_a_removed_or_replaced_directory() {
        let work = tempfile::tempdir().unwrap();
        let directory = work.path().join("locks");
        let path = directory.join("daemon");
        fs::create_dir(&directory).unwrap();
        let file = File::create(&path).unwrap();
        let lock = DirectoryLock::of(&path, &file).unwrap();
        assert!(lock.is_in_place());
        fs::rename(&directory, work.path().join("before")).unwrap();
        assert!(!lock.is_in_place());
        fs::create_dir(&directory).unwrap();
        assert!(!lock.is_in_place());
        File::create(&path).unwrap();
        assert!(!lock.is_in_place());
        fs::remove_dir_all(&directory).unwrap();
        fs::rename(work.path().join("before"), &directory).unwrap();
        assert!(lock.is_in_place());
    }
}
