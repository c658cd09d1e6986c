//! Limits on the result of unpacking.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Counts entries and bytes below a directory, and checks that each entry is of a permitted kind.
pub fn survey(path: &Path) -> (u64, u64) {
    let (mut entries, mut bytes) = (0, 0);
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        let m = fs::symlink_metadata(&path).unwrap();
        let kind = m.file_type();
        // overlayfs marks a removed entry by a character device with the number 0.
        let mark = kind.is_char_device() && m.rdev() == 0;
        assert!(
            kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_fifo() || mark,
            "{path:?}"
        );
        entries += 1;
        if kind.is_file() {
            bytes += m.len();
        }
        if kind.is_dir() {
            let below = survey(&path);
            (entries, bytes) = (entries + below.0, bytes + below.1);
        }
    }
    (entries, bytes)
}
