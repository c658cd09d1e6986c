//! State of a file: type, size, permissions and owner.
//!
//! `jiffy diff` compares the states of files in two sandboxes.

use super::{look_up, names_below};
use serde::Serialize;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// Maximum number of files in a directory whose sizes are added.
const MAX_ADDED_SIZES: usize = 100_000;

/// State of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileState {
    /// `f`: regular file. `d`: directory. `l`: symbolic link. `o`: socket, pipe or device.
    #[serde(rename = "type")]
    pub kind: char,
    /// Size in bytes. 0 for a directory, except if the directory was deleted.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Number of the user.
    pub uid: u32,
    /// Number of the group.
    pub gid: u32,
}

impl FileState {
    /// Returns the state of a file, without following a symbolic link.
    pub fn of(found: &Metadata) -> Self {
        let kind = found.file_type();
        let (kind, size) = if kind.is_file() {
            ('f', found.len())
        } else if kind.is_dir() {
            ('d', 0)
        } else if kind.is_symlink() {
            ('l', found.len())
        } else {
            ('o', 0)
        };
        Self {
            kind,
            size,
            mode: found.mode() & 0o7777,
            uid: found.uid(),
            gid: found.gid(),
        }
    }
}

/// Returns the size of the regular files below a directory of the template. `directories` are the
/// directories of this path in the layers of the template, uppermost first. Files beyond
/// [`MAX_ADDED_SIZES`] are not included.
pub fn total_size(directories: &[PathBuf], step: &dyn Fn()) -> u64 {
    let mut total = 0_u64;
    let mut remaining = MAX_ADDED_SIZES;
    let mut waiting = vec![directories.to_vec()];
    while let Some(directories) = waiting.pop() {
        step();
        // A directory that cannot be read has no known size.
        for name in names_below(&directories).unwrap_or_default() {
            let Some(less) = remaining.checked_sub(1) else {
                return total;
            };
            remaining = less;
            match look_up(&directories, &name) {
                (Some(found), _) if found.is_file() => total = total.saturating_add(found.len()),
                (Some(found), below) if found.is_dir() => waiting.push(below),
                _ => {}
            }
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn sizes_of_all_layers_of_a_directory_are_added_once() {
        let dir = tempfile::tempdir().unwrap();
        let [high, low] = ["high", "low"].map(|name| dir.path().join(name));
        for (root, file, size) in [
            (&low, "d/a", 10),
            (&low, "d/deep/b", 100),
            (&high, "d/a", 1000),
            (&high, "d/c", 10_000),
        ] {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, vec![b'x'; size]).unwrap();
        }
        let directories = [high.join("d"), low.join("d")];
        assert_eq!(total_size(&directories, &|| ()), 11_100);
    }
}
