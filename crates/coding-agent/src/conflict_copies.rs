//! Conflict copies: files of the sandbox that were not copied to the project directory, for example
//! because the host has changed the same file. They are saved in a separate directory.

use crate::host_directory::{HostDirectory, NewFile};
use crate::session_files::create_directory;
use crate::tree::{Content, FileState};
use crate::tree_path::TreePath;
use anyhow::Context;
use std::path::{Path, PathBuf};

/// Copies the file at `path` in `source` to `directory`, which is created. Returns the path of the
/// copy. `None` for directories.
pub fn save(
    directory: &Path,
    path: &TreePath,
    state: &FileState,
    source: &HostDirectory,
) -> anyhow::Result<Option<PathBuf>> {
    if state.is_directory() {
        return Ok(None);
    }
    create_directory(directory)?;
    let target = HostDirectory::open(directory)?;
    let expected = target.stat(path)?;
    let mut content;
    let new = match &state.content {
        Content::Symlink(link) => NewFile::Symlink(&link.0),
        _ => {
            let context = || format!("cannot read {}", source.shown(path));
            let (file, listed) = source.read(path)?.with_context(context)?;
            content = file;
            NewFile::File {
                content: &mut content,
                mode: 0o600,
                mtime: listed.stamp.mtime,
            }
        }
    };
    target.replace(path, expected.as_ref(), new)?;
    Ok(Some(directory.join(path.path())))
}
