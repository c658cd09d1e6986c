//! Atomic creation of files, and I/O errors with the action and path that failed.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Failed file operation: action, path and cause.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct FileError {
    /// Action as a verb ("read", "create").
    pub action: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

/// Adds the action and path to an I/O error.
pub(crate) trait OnPath<T> {
    fn on(self, action: &'static str, path: &Path) -> Result<T, FileError>;
}

impl<T> OnPath<T> for io::Result<T> {
    fn on(self, action: &'static str, path: &Path) -> Result<T, FileError> {
        self.map_err(|source| FileError {
            action,
            path: path.to_owned(),
            source,
        })
    }
}

/// Name prefix of unfinished files and directories. The holder of the lock under which they are
/// created may remove earlier ones.
pub(crate) const UNFINISHED: &str = ".new-";

/// Creates `dir/name` with the content that `fill` writes. The creation is atomic: after a crash
/// the file is complete or missing.
///
/// The caller must hold the lock of `dir`. Unfinished files of earlier attempts are removed first.
pub(crate) fn create<E: From<FileError>>(
    dir: &Path,
    name: &str,
    fill: impl FnOnce(&mut tempfile::NamedTempFile) -> Result<(), E>,
) -> Result<PathBuf, E> {
    remove_unfinished(dir)?;
    replace(dir, name, UNFINISHED, fill)
}

/// Creates a small file atomically without a lock: the last writer wins. The separate prefix
/// prevents [`create`] from removing the temporary files of concurrent writers.
pub(crate) fn write(dir: &Path, name: &str, bytes: &[u8]) -> Result<PathBuf, FileError> {
    replace(dir, name, ".write-", |file| {
        file.write_all(bytes).on("write", &dir.join(name))
    })
}

/// Writes a temporary file with `prefix` in `dir`, flushes it, and renames it to `name`.
fn replace<E: From<FileError>>(
    dir: &Path,
    name: &str,
    prefix: &str,
    fill: impl FnOnce(&mut tempfile::NamedTempFile) -> Result<(), E>,
) -> Result<PathBuf, E> {
    let path = dir.join(name);
    let mut file = tempfile::Builder::new()
        .prefix(prefix)
        .tempfile_in(dir)
        .on("create a file in", dir)?;
    fill(&mut file)?;
    file.as_file()
        .set_permissions(Permissions::from_mode(0o400))
        .on("protect", &path)?;
    file.as_file().sync_all().on("flush", &path)?;
    file.persist(&path)
        .map_err(|e| e.error)
        .on("create", &path)?;
    sync_dir(dir)?;
    Ok(path)
}

/// Flushes the directory entries of `dir`.
pub(crate) fn sync_dir(dir: &Path) -> Result<(), FileError> {
    File::open(dir).and_then(|d| d.sync_all()).on("flush", dir)
}

/// Removes unfinished files from `dir`.
fn remove_unfinished(dir: &Path) -> Result<(), FileError> {
    for entry in fs::read_dir(dir).on("list", dir)? {
        let path = entry.on("list", dir)?.path();
        let unfinished = path
            .file_name()
            .is_some_and(|n| n.as_encoded_bytes().starts_with(UNFINISHED.as_bytes()));
        if unfinished && path.is_file() {
            fs::remove_file(&path).on("remove", &path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_attempt_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let failed = create(dir.path(), "x", |file| {
            file.write_all(b"half").unwrap();
            Err(io::Error::other("disk full")).on("write", Path::new("x"))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn remains_of_a_killed_attempt_are_removed_by_the_next() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(".new-killed"), b"half").unwrap();
        let path = create::<FileError>(dir.path(), "x", |file| {
            file.write_all(b"whole").on("write", Path::new("x"))
        })
        .unwrap();
        assert_eq!(fs::read(path).unwrap(), b"whole");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
