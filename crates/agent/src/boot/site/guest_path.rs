//! Paths of a guest below a directory that is its root.

use std::path::{Component, Path, PathBuf};

/// The place of `path` in the file system on `root`.
pub fn beneath(root: &Path, path: &Path) -> PathBuf {
    let parts = path.components().filter(|c| *c != Component::RootDir);
    root.join(parts.collect::<PathBuf>())
}
