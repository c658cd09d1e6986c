//! All that is in a tree, by path.

use anyhow::{Context, ensure};
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Levels of directories in a tree.
pub const MAX_DEPTH: usize = 128;

/// Entries of a tree, as paths below it.
#[derive(Debug, Clone, Default)]
pub struct Survey(HashSet<OsString>);

impl Survey {
    /// Entries of the tree at `root`, which has at most so many, and so many bytes of files. No
    /// symbolic link is followed.
    pub fn of(root: &Path, max_bytes: u64, max_entries: usize) -> anyhow::Result<Self> {
        let mut all = HashSet::new();
        let mut bytes = 0_u64;
        let mut waiting = vec![(PathBuf::new(), 0)];
        while let Some((below, depth)) = waiting.pop() {
            let path = root.join(&below);
            let failed = || format!("cannot read {}", path.display());
            let metadata = match depth {
                // A path that ends with a slash would be one through a link.
                0 => fs::symlink_metadata(root),
                _ => fs::symlink_metadata(&path),
            };
            let metadata = metadata.with_context(failed)?;
            if metadata.is_file() {
                bytes = bytes.saturating_add(metadata.len());
            }
            ensure!(
                bytes <= max_bytes && all.len() < max_entries && depth <= MAX_DEPTH,
                "it is more than {} MiB, {max_entries} files or {MAX_DEPTH} levels",
                max_bytes >> 20
            );
            if depth > 0 {
                all.insert(below.clone().into_os_string());
            }
            if metadata.is_dir() {
                for entry in fs::read_dir(&path).with_context(failed)? {
                    let name = entry.with_context(failed)?.file_name();
                    waiting.push((below.join(name), depth + 1));
                }
            }
        }
        Ok(Self(all))
    }

    /// True if there is such an entry.
    pub fn has(&self, path: &Path) -> bool {
        self.0.contains(path.as_os_str())
    }
}
