//! Private files of a member in `<data directory>/fleet/`: certificates and keys.

use crate::SetupError;
use std::fs::{DirBuilder, File, rename};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

/// Writes a file atomically with mode 0600.
pub(crate) fn write_private(path: &Path, content: &[u8]) -> Result<(), SetupError> {
    let failed = |error| SetupError::file(path)(error);
    let draft = path.with_extension("new");
    let parent = path.parent().unwrap_or(path);
    let write = || -> std::io::Result<()> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(parent)?;
        match std::fs::remove_file(&draft) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&draft)?;
        file.write_all(content)?;
        file.sync_all()?;
        rename(&draft, path)?;
        File::open(parent)?.sync_all()
    };
    write().map_err(failed)
}

/// Reads a file of at most `max` bytes. `None` if it does not exist.
pub(crate) fn read(path: &Path, max: u64) -> Result<Option<String>, SetupError> {
    let metadata = match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        metadata => metadata.map_err(SetupError::file(path))?,
    };
    if metadata.len() > max {
        return Err(SetupError::content(path, format!("it exceeds {max} bytes")));
    }
    std::fs::read_to_string(path)
        .map(Some)
        .map_err(SetupError::file(path))
}

/// Like [`read`]. The file must exist.
pub(crate) fn read_existing(path: &Path, max: u64) -> Result<String, SetupError> {
    read(path, max)?
        .ok_or_else(|| SetupError::file(path)(std::io::Error::from(std::io::ErrorKind::NotFound)))
}
