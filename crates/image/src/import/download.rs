//! Files to which an import downloads the layers of an image from a registry.
//!
//! An interrupted import of the host's owner continues its downloads.

use super::ImportError;
use crate::file::{FileError, OnPath};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// File for the download of a layer. No other import writes to it.
///
/// For the host's owner, the file has a name, so that an interrupted download can be resumed. One
/// import at a time holds the lock of the file. Concurrent imports, and all imports by API keys,
/// use unnamed files. An unnamed file is removed with the import, so a partial download of a key is
/// never resumed or trusted.
pub(super) struct Download {
    pub file: File,
    /// Path of the file. For an unnamed file, the path of its directory.
    pub path: PathBuf,
    /// True if the file has a name, by which a later import can continue the download.
    named: bool,
}

impl Download {
    /// Opens the file for a blob. An interrupted download of the host's owner is continued.
    /// `by_key` states that an API key imports the image, and not the host's owner.
    pub(super) fn open(blobs: &Path, sha256: &str, by_key: bool) -> Result<Self, ImportError> {
        if !by_key && let Some(download) = Self::named(&blobs.join(format!("sha256-{sha256}")))? {
            return Ok(download);
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o600)
            // The kernel removes an unnamed file when its last descriptor is closed, even after a
            // crash.
            .custom_flags(libc::O_TMPFILE)
            .open(blobs);
        Ok(Self {
            file: file.on("create a file in", blobs)?,
            path: blobs.to_owned(),
            named: false,
        })
    }

    /// Opens the named file. Returns `None` if another import holds its lock.
    fn named(path: &Path) -> Result<Option<Self>, FileError> {
        loop {
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .read(true)
                .write(true)
                .mode(0o600)
                .open(path)
                .on("open", path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(e)) => return Err(e).on("lock", path),
            }
            // The previous holder of the lock may have removed the file after this process opened
            // it. The lock would then protect a file that no other import sees.
            if file.metadata().on("examine", path)?.nlink() > 0 {
                return Ok(Some(Self {
                    file,
                    path: path.to_owned(),
                    named: true,
                }));
            }
        }
    }

    /// Removes the file after its layer was unpacked, or if its content is wrong.
    pub(super) fn remove(self) -> Result<(), ImportError> {
        if self.named {
            // The lock is still held, so no other import writes to the file.
            fs::remove_file(&self.path).on("remove", &self.path)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn no_two_imports_share_the_file_of_a_layer() {
        let blobs = tempfile::tempdir().unwrap();
        let open = |by_key| Download::open(blobs.path(), "x", by_key).unwrap();
        let mut first = open(false);
        first.file.write_all(b"half").unwrap();
        for other in [open(false), open(true)] {
            assert_eq!(other.file.metadata().unwrap().len(), 0);
            drop(other);
        }
        drop(first);
        assert_eq!(
            open(true).file.metadata().unwrap().len(),
            0,
            "only the host's owner uses named files"
        );
        let again = open(false);
        assert_eq!(
            again.file.metadata().unwrap().len(),
            4,
            "the partial download is retained"
        );
        again.remove().unwrap();
        assert_eq!(fs::read_dir(blobs.path()).unwrap().count(), 0);
    }
}
