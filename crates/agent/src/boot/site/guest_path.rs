//! Paths of a guest whose root is a directory of this process.

use std::path::{Component, Path, PathBuf};

/// Returns the location of `path` in the file system on `root`.
pub fn beneath(root: &Path, path: &Path) -> PathBuf {
    let parts = path.components().filter(|c| *c != Component::RootDir);
    root.join(parts.collect::<PathBuf>())
}
