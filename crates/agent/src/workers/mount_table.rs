//! Finds the mount point of a path.
//!
//! A call on a file system that does not answer (for example FUSE) blocks its worker thread: it is
//! *stuck*. The agent limits the number of stuck calls per file system, so that one file system
//! cannot occupy all threads. It identifies a file system by its mount point.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Returns the mount points that processes in the agent's mount namespace see. Empty if they cannot
/// be read.
pub fn mount_points() -> Vec<PathBuf> {
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let lines = table.split(|byte| *byte == b'\n');
    lines.filter_map(mount_point).collect()
}

/// Decodes the fifth field of a line of mountinfo, in which blanks and backslashes are octal
/// escapes.
fn mount_point(line: &[u8]) -> Option<PathBuf> {
    let field = line.split(|byte| *byte == b' ').nth(4)?;
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, after @ ..] = rest {
        let digits = after.get(..3).and_then(|d| std::str::from_utf8(d).ok());
        let escaped = digits.and_then(|d| u8::from_str_radix(d, 8).ok());
        match escaped.filter(|_| *first == b'\\') {
            Some(byte) => {
                path.push(byte);
                rest = &after[3..];
            }
            None => {
                path.push(*first);
                rest = after;
            }
        }
    }
    Some(OsString::from_vec(path).into())
}

/// Returns the mount point that contains `path`, judged by its name. Returns `path` itself if that
/// mount point is the root or unknown. Otherwise, a few stuck calls would make the whole root file
/// system inaccessible.
pub fn place<'a>(mounts: &'a [PathBuf], path: &'a Path) -> &'a Path {
    let above = mounts.iter().filter(|mount| path.starts_with(mount));
    // Mount points may be nested. The longest one contains the path.
    let nearest = above.max_by_key(|mount| mount.as_os_str().len());
    match nearest {
        Some(mount) if mount != Path::new("/") => mount,
        _ => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_belongs_to_the_nearest_mount_point() {
        let line = b"36 35 0:31 / /home/user/my\\040mount rw,relatime - fuse.x x rw";
        let mounts = [
            PathBuf::from("/"),
            PathBuf::from("/home"),
            mount_point(line).unwrap(),
        ];
        for (path, expected) in [
            ("/etc/passwd", "/etc/passwd"),
            ("/home/user/f", "/home"),
            ("/homework", "/homework"),
            ("/home/user/my mount/a/b", "/home/user/my mount"),
        ] {
            assert_eq!(place(&mounts, Path::new(path)), Path::new(expected));
        }
        assert_eq!(mount_point(b"36 35"), None);
    }
}
