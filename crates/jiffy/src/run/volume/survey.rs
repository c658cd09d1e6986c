//! Entries of a tree, as they were before a command: the guest's copy is compared with them.

use anyhow::{Context, ensure};
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of directory levels in a tree.
pub const MAX_DEPTH: usize = 128;

/// Entries of a tree, as paths relative to its root.
#[derive(Debug, Clone, Default)]
pub struct TreeEntries(HashSet<OsString>);

impl TreeEntries {
    /// Reads the entries of the tree at `root` without following symbolic links. Fails if the tree
    /// has more than `max_entries` entries, `max_bytes` bytes of files or [`MAX_DEPTH`] levels.
    pub fn of(root: &Path, max_bytes: u64, max_entries: usize) -> anyhow::Result<Self> {
        let mut all = HashSet::new();
        let mut bytes = 0_u64;
        // The walk is not recursive, so that a deep tree cannot overflow the stack.
        let mut pending = vec![(PathBuf::new(), 0)];
        while let Some((relative, depth)) = pending.pop() {
            let path = root.join(&relative);
            let context = || format!("cannot read {}", path.display());
            // `root.join("")` ends with a slash, and would therefore follow a symbolic link.
            let entry = if depth == 0 { root } else { &path };
            let metadata = fs::symlink_metadata(entry).with_context(context)?;
            if metadata.is_file() {
                // Sparse files count with their full length, because the copy is not sparse.
                bytes = bytes.saturating_add(metadata.len());
            }
            ensure!(
                bytes <= max_bytes && all.len() < max_entries && depth <= MAX_DEPTH,
                "the tree exceeds {} MiB, {max_entries} files or {MAX_DEPTH} levels",
                max_bytes >> 20
            );
            if depth > 0 {
                all.insert(relative.clone().into_os_string());
            }
            if metadata.is_dir() {
                for entry in fs::read_dir(&path).with_context(context)? {
                    let name = entry.with_context(context)?.file_name();
                    pending.push((relative.join(name), depth + 1));
                }
            }
        }
        Ok(Self(all))
    }

    /// Returns whether the tree has an entry with this path.
    pub fn has(&self, path: &Path) -> bool {
        self.0.contains(path.as_os_str())
    }
}
